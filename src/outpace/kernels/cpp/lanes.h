// A vector of floats as wide as the instruction set that this is compiled for, and what is done with it.
//
// Every operation rounds as its scalar form does, and no sum is left to the compiler's choice of order (it is told not
// to fuse or reorder): a number depends on its own inputs alone.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitLanes __attribute__((vector_size(4 * kLanes)));
typedef int8_t ByteLanes __attribute__((vector_size(kLanes)));
typedef uint16_t HalfLanes __attribute__((vector_size(2 * kLanes)));

static inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

static inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

static inline Lanes all(float number) { return Lanes{} + number; }

// a * b + c, rounded once where the instruction set can.
static inline Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// b of numbers that cannot be compared.
static inline Lanes larger(Lanes a, Lanes b) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_max_ps((__m512)a, (__m512)b);  // one instruction, where compilers take two
#elif defined(__AVX2__)
  return (Lanes)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

static inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }

// The sum of all lanes, in one order.
static inline float sum(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)lanes);
#else
  float each[kLanes];
  store(each, lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) each[lane] += each[lane + half];
  return each[0];
#endif
}

// The sums of the lanes of four vectors, each by the same tree of additions.
static inline void sum_four(const Lanes* lanes, float* out) {
#if defined(__AVX512F__)
  const auto pairs = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
  const __m512d low = _mm512_castps_pd(pairs((__m512)lanes[0], (__m512)lanes[1]));
  const __m512d high = _mm512_castps_pd(pairs((__m512)lanes[2], (__m512)lanes[3]));
  const __m512 quarters = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                                        _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(quarters), 1)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#else
  for (int each = 0; each < 4; ++each) out[each] = sum(lanes[each]);
#endif
}

static inline float largest(Lanes lanes) {
  float found = lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) found = lanes[lane] > found ? lanes[lane] : found;
  return found;
}

// The nearest whole numbers, the even one of two as near: adding so much leaves no room for a fraction.
static inline IntLanes rounded(Lanes x) { return __builtin_convertvector(x + 12582912.0f - 12582912.0f, IntLanes); }

// e^x within two units in the last place: 2^n times a polynomial, for x below 88.
static inline Lanes exponential(Lanes x) {
  x = larger(x, all(-87.0f));
  Lanes n = fma(x, all(1.44269504f), all(12582912.0f)) - 12582912.0f;  // rounds to the nearest integer
  Lanes rest = fma(n, all(-0.693359375f), x);
  rest = fma(n, all(2.12194440e-4f), rest);
  Lanes p = all(1.9875691500e-4f);
  p = fma(p, rest, all(1.3981999507e-3f));
  p = fma(p, rest, all(8.3334519073e-3f));
  p = fma(p, rest, all(4.1665795894e-2f));
  p = fma(p, rest, all(1.6666665459e-1f));
  p = fma(p, rest, all(5.0000001201e-1f));
  p = fma(p, rest * rest, rest + 1.0f);
  IntLanes power = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  return p * (Lanes)power;
}

// bfloat16: the upper half of a float's bits, rounded to even.
static inline uint16_t to_bfloat16(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline Lanes load_bfloat16(const uint16_t* from) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256((const __m256i*)from);
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif defined(__AVX2__)
  const __m128i halves = _mm_loadu_si128((const __m128i*)from);
  return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
  HalfLanes halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Lanes)(__builtin_convertvector(halves, BitLanes) << 16);
#endif
}

static inline float as_float(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

static inline float as_float(int8_t whole) { return float(whole); }

// Integers of a byte lose nothing in bfloat16.
static inline uint16_t exact_bfloat16(int8_t whole) {
  const float number = whole;
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  return uint16_t(bits >> 16);
}
