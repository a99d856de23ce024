// A vector of floats as wide as the instruction set that this is compiled for, and what is done with it.
//
// Every operation rounds as its scalar form does, and no sum is left to the compiler's choice of order (it is told not
// to fuse or reorder): a number depends on its own inputs alone.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// 1 where rows in bfloat16 are multiplied by pairs of numbers: by BFDOT of ARM, and by VDPBF16PS of AMD (levels.py), which
// on a Zen 4 takes as long as a product of floats. On an Emerald Rapids it takes four times as long.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || (defined(__AVX512BF16__) && !defined(__AMX_BF16__))
#define OUTPACE_BFDOT 1
#else
#define OUTPACE_BFDOT 0
#endif

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitLanes __attribute__((vector_size(4 * kLanes)));
typedef int8_t ByteLanes __attribute__((vector_size(kLanes)));

// Reads the bits at an address as another type.
template <class T>
static inline T bits_at(const void* from) {
  T bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

static inline Lanes load(const float* from) { return bits_at<Lanes>(from); }

static inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

static inline Lanes all(float number) { return number - Lanes{}; }  // + 0 would be an instruction: it changes -0

// a * b + c, rounded once where the instruction set can: every level with AVX2 has FMA, and F16C (levels.py).
static inline Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512BW__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// b of numbers that cannot be compared.
static inline Lanes larger(Lanes a, Lanes b) {
#if defined(__AVX512BW__)
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
#if defined(__AVX512BW__)
  return _mm512_reduce_add_ps((__m512)lanes);
#elif defined(__aarch64__)
  const float32x4_t own = (float32x4_t)lanes;
  return vaddv_f32(vadd_f32(vget_low_f32(own), vget_high_f32(own)));
#else
  float each[kLanes];
  store(each, lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) each[lane] += each[lane + half];
  return each[0];
#endif
}

static inline int32_t sum(IntLanes lanes) {
#if defined(__AVX512BW__)
  return _mm512_reduce_add_epi32((__m512i)lanes);  // where compilers take the lanes out one by one
#else
  int32_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
#endif
}

// The sum of products, in lanes that do not depend on anything but the width.
static inline float dot(const float* left, const float* right, int width) {
  Lanes total = {};
  int at = 0;
  for (; at + kLanes <= width; at += kLanes) total = fma(load(left + at), load(right + at), total);
  float rest = 0;
  for (; at < width; ++at) rest += left[at] * right[at];
  return sum(total) + rest;
}

static inline float largest(Lanes lanes) {
#if defined(__aarch64__)
  return vmaxnmvq_f32((float32x4_t)lanes);
#elif defined(__AVX512BW__)
  return _mm512_reduce_max_ps((__m512)lanes);
#else
  float found = lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) found = lanes[lane] > found ? lanes[lane] : found;
  return found;
#endif
}

static inline int32_t largest(IntLanes lanes) {
#if defined(__aarch64__)
  return vmaxvq_s32((int32x4_t)lanes);
#elif defined(__AVX512BW__)
  return _mm512_reduce_max_epi32((__m512i)lanes);
#else
  int32_t found = lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) found = lanes[lane] > found ? lanes[lane] : found;
  return found;
#endif
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

// Numbers that fit a byte, one behind the other.
static inline void store_bytes(int8_t* to, IntLanes lanes) {
#if defined(__AVX512BW__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)lanes));
#else
  const ByteLanes bytes = __builtin_convertvector(lanes, ByteLanes);
  std::memcpy(to, &bytes, sizeof bytes);
#endif
}

#define INLINE __attribute__((always_inline))  // for lambdas: a call keeps captured variables in memory

template <class Work, int... Index>
static inline void for_each_of(std::integer_sequence<int, Index...>, Work work) {
  (work(std::integral_constant<int, Index>()), ...);
}

// `work` for the indices below `Count`, as constants.
template <int Count, class Work>
static inline void for_each(Work work) { for_each_of(std::make_integer_sequence<int, Count>(), work); }

// Words of 32 bits of a row, of which each multiplies a vector: a float, two numbers in bfloat16 or four bytes. NEON
// multiplies by one of four words in a register; other instruction sets fetch a word to all lanes.
#if defined(__aarch64__)
constexpr int kWords = 4;
typedef uint32x4_t Words;
#else
constexpr int kWords = 1;
typedef uint32_t Words;
#endif

static inline Words load_words(const void* from) { return bits_at<Words>(from); }

// sum + numbers times word `Index`, which is a float.
template <int Index>
static inline Lanes add_float(Lanes sum, Lanes numbers, Words words) {
#if defined(__aarch64__)
  return (Lanes)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)numbers, (float32x4_t)words, Index);
#else
  return fma(all(bits_at<float>(&words)), numbers, sum);
#endif
}

// bfloat16: the upper half of a float's bits, rounded to even.
static inline uint16_t to_bfloat16(float number) {
  const uint32_t bits = bits_at<uint32_t>(&number);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float as_float(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  return bits_at<float>(&bits);
}

static inline float as_float(int8_t whole) { return float(whole); }

// Integers of a byte lose nothing in bfloat16.
static inline uint16_t exact_bfloat16(int8_t whole) {
  const float number = whole;
  return uint16_t(bits_at<uint32_t>(&number) >> 16);
}
