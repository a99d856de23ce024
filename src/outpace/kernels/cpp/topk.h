// The largest numbers of rows, also of draft logits under the noise of keyed draws.
// Python reference: torch.topk, and outpace.sampling.scores.best_scores under noise.
#pragma once
#include "noise.h"
#include "pool.h"
#include "rows.h"

// The logarithm of the sum of e^(x - top).
static inline float log_of_sum(const float* row, int width, float top) {
  Lanes total = {};
  int at = 0;
  for (; at + kLanes <= width; at += kLanes) total += exponential(load(row + at) - top);
  float rest = 0;
  for (; at < width; ++at) rest += std::exp(row[at] - top);
  return std::log(sum(total) + rest);
}

// Whether a number comes before another: NaN before all others, so that who checks the first one finds it.
static inline bool is_ahead(float one, float other) { return one > other || (std::isnan(one) && !std::isnan(other)); }

// Whether a lane may come before a number: it is larger, or one of the two is NaN.
static inline bool any_ahead(Lanes lanes, float other) {
#if defined(__AVX512BW__)
  return _mm512_cmp_ps_mask((__m512)lanes, _mm512_set1_ps(other), _CMP_NLE_UQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)lanes, _mm256_set1_ps(other), _CMP_NLE_UQ)) != 0;
#elif defined(__aarch64__)
  return vminvq_u32(vcleq_f32((float32x4_t)lanes, vdupq_n_f32(other))) == 0;
#else
  return sum((IntLanes)(lanes <= other)) != -kLanes;
#endif
}

// The `wanted` largest numbers of a row and where they are, largest first, the earlier of equals first; as logarithms of
// probabilities where they are to be normalised.
static inline void find_largest(const float* row, int width, int wanted, bool normalised, float* best, int64_t* where) {
  int found = 0, at = 0;
  const auto insert = [&](float number, int64_t place) {
    int rank = found < wanted ? found++ : wanted - 1;
    for (; rank > 0 && is_ahead(number, best[rank - 1]); --rank)
      best[rank] = best[rank - 1], where[rank] = where[rank - 1];
    best[rank] = number, where[rank] = place;
  };
  for (; at < wanted; ++at) insert(row[at], at);
  for (; at + kLanes <= width; at += kLanes) {
    if (!any_ahead(load(row + at), best[wanted - 1])) continue;
    for (int lane = 0; lane < kLanes; ++lane)
      if (is_ahead(row[at + lane], best[wanted - 1])) insert(row[at + lane], at + lane);
  }
  for (; at < width; ++at)
    if (is_ahead(row[at], best[wanted - 1])) insert(row[at], at);
  if (!normalised) return;
  const float shift = best[0] + log_of_sum(row, width, best[0]);
  for (int each = 0; each < wanted; ++each) best[each] -= shift;
}

// Keyed draws of the target for which rows of logits are drafts. Rows of one request at one depth share a draw.
struct KeyedDraws {
  const int32_t* keys;         // [count, 2]
  const int64_t* const* ids;   // [count] of [width], the ids of the columns; null where columns are ids
  const int32_t* draw_of_row;  // [rows]; -1 where a row's logits are its scores
  const float* temperatures;   // [rows]
  int32_t count;
};

constexpr int kNoisePiece = 1024;  // ids that a thread takes at a time

// Noise [draws, width] of all draws.
static inline void compute_noise(Team& team, const KeyedDraws& at, int width, float* noise) {
  const int pieces = (width + kNoisePiece - 1) / kNoisePiece;
  team.share(at.count * pieces, [&](int piece) {
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

// The row's logits become logits / temperature + noise, if it has a draw.
static inline void add_noise(const KeyedDraws& at, int row, int width, const float* noise, float* logits) {
  if (at.draw_of_row[row] < 0) return;
  const float temperature = at.temperatures[row], *own = noise + size_t(at.draw_of_row[row]) * width;
  for (int column = 0; column < width; ++column) logits[column] = logits[column] / temperature + own[column];
}
