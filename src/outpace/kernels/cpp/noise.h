// Keyed Gumbel noise: exactly in double precision, and a vector of ids at a time in float32.
// Python reference: outpace.sampling.noise (noise_bits, gumbel).
#pragma once
#include "lanes.h"

template <class Bits>
static inline Bits mix(Bits bits) {
  bits = (bits ^ bits >> 16) * 0x7FEB352Du;
  bits = (bits ^ bits >> 15) * 0x846CA68Bu;
  return bits ^ bits >> 16;
}

// The hash of an id, and its noise.
static inline uint32_t noise_word(const int32_t* key, int64_t token) {
  return mix(mix(uint32_t(token) * 0x9E3779B9u + uint32_t(key[0])) ^ uint32_t(key[1]));
}

static inline double gumbel(const int32_t* key, int64_t token) {
  const double value = std::min((double(noise_word(key, token)) + 0.5) * 0x1p-32, 1.0 - 0x1p-24);
  return -std::log(-std::log1p(-value));
}

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

// A uniform number of each of some ids, by the same hash and bit for bit as `sampling.noise` has it in float32.
static inline Lanes uniform_of(const int32_t* key, BitLanes ids) {
  const BitLanes bits = mix(mix(ids * 0x9E3779B9u + uint32_t(key[0])) ^ uint32_t(key[1]));
  const IntLanes word = (IntLanes)bits;
  const Lanes value = __builtin_convertvector(word, Lanes) + (word < 0 ? all(4294967296.0f) : Lanes{});
  return smaller((value + 0.5f) * 2.3283064365386963e-10f, all(0.999999940395355f));
}

// The noise of some ids.
static inline Lanes noise_of(const int32_t* key, BitLanes ids) {
  const Lanes uniform = uniform_of(key, ids);
  // log1p(-u): what rounding 1 - u lost is made good by the ratio.
  const Lanes left = 1.0f - uniform, lost = left - 1.0f;
  const Lanes ratio = -uniform / (lost == 0.0f ? all(1.0f) : lost);
  return -logarithm(lost == 0.0f ? uniform : -logarithm(left) * ratio);
}
