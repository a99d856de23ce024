// Scores of drafts under the noise of the draws that await them (sampling/noise.py), a vector of ids at a time.
#pragma once
#include "rows.h"

// The draws of the target that rows of draft logits await. Rows of one request at one depth await the same.
struct Awaited {
  const int32_t* keys;         // [draws, 2]
  const int64_t* const* ids;   // [draws] of [width], the ids of the columns; null where columns are ids
  const int32_t* draw_of;      // [rows]; -1 where a row's logits count as they are
  const float* temperatures;   // [rows]
  int32_t draws;
};

// ln x within two units in the last place, for x above the smallest normal number.
static inline Lanes logarithm(Lanes x) {
  const BitLanes bits = (BitLanes)x - 0x3f3504f3u;  // of sqrt(1/2): what is left lies between it and sqrt(2)
  const IntLanes power = (IntLanes)bits >> 23;
  const Lanes rest = (Lanes)((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const Lanes n = __builtin_convertvector(power, Lanes), square = rest * rest;
  Lanes p = all(7.0376836292e-2f);
  p = fma(p, rest, all(-1.1514610310e-1f));
  p = fma(p, rest, all(1.1676998740e-1f));
  p = fma(p, rest, all(-1.2420140846e-1f));
  p = fma(p, rest, all(1.4249322787e-1f));
  p = fma(p, rest, all(-1.6668057665e-1f));
  p = fma(p, rest, all(2.0000714765e-1f));
  p = fma(p, rest, all(-2.4999993993e-1f));
  p = fma(p, rest, all(3.3333331174e-1f));
  p = fma(p * rest, square, n * -2.12194440e-4f);
  return fma(n, all(0.693359375f), rest + fma(square, all(-0.5f), p));
}

static inline BitLanes mixed(BitLanes bits) {
  bits = (bits ^ bits >> 16) * 0x7FEB352Du;
  bits = (bits ^ bits >> 15) * 0x846CA68Bu;
  return bits ^ bits >> 16;
}

// The noise of some ids: the same hash and the same uniform number, bit for bit, as `sampling.noise` has in float32.
static inline Lanes noise_of(const int32_t* key, BitLanes ids) {
  const BitLanes bits = mixed(mixed(ids * 0x9E3779B9u + uint32_t(key[0])) ^ uint32_t(key[1]));
  const IntLanes word = (IntLanes)bits;
  const Lanes value = __builtin_convertvector(word, Lanes) + (word < 0 ? all(4294967296.0f) : Lanes{});
  const Lanes uniform = smaller((value + 0.5f) * 2.3283064365386963e-10f, all(0.999999940395355f));
  // log1p(-u): what rounding 1 - u lost is made good by the ratio.
  const Lanes left = 1.0f - uniform, lost = left - 1.0f;
  const Lanes ratio = -uniform / (lost == 0.0f ? all(1.0f) : lost);
  return -logarithm(lost == 0.0f ? uniform : -logarithm(left) * ratio);
}

constexpr int kNoisePiece = 1024;  // ids that a thread takes at a time

// Noise [draws, width] of all draws.
static inline void work_out_noise(Team& team, const Awaited& at, int width, float* noise) {
  const int pieces = (width + kNoisePiece - 1) / kNoisePiece;
  team.share(at.draws * pieces, [&](int piece) {
    const int draw = piece / pieces, from = piece % pieces * kNoisePiece, to = std::min(width, from + kNoisePiece);
    const int32_t* key = at.keys + 2 * draw;
    for (int column = from; column < to; column += kLanes) {
      const int count = std::min(kLanes, to - column);
      BitLanes ids = {};
      for (int lane = 0; lane < count; ++lane) ids[lane] = uint32_t(at.ids ? at.ids[draw][column + lane] : column + lane);
      const Lanes found = noise_of(key, ids);
      std::memcpy(noise + size_t(draw) * width + column, &found, sizeof(float) * count);
    }
  });
}

// The row's logits become logits / temperature + noise, where it awaits a draw.
static inline void add_noise(const Awaited& at, int row, int width, const float* noise, float* logits) {
  if (at.draw_of[row] < 0) return;
  const float temperature = at.temperatures[row], *own = noise + size_t(at.draw_of[row]) * width;
  for (int column = 0; column < width; ++column) logits[column] = logits[column] / temperature + own[column];
}
