// Products of attention with a key to each lane for scores, and a number of a value to each lane for sums: no lane is
// idle where a single row has few queries. Every sum has the order, and the bits, of tiles.h, where a lane is a query.
#pragma once
#include "tiles.h"

// Up to how many queries of a key head this is faster than tiles.h. Measured: with AVX-512 it is for all numbers, with
// AVX2 where the queries would not fill a vector. NEON was not measured.
constexpr int kMostByKey = kLanes == 16 ? INT32_MAX : kLanes == 8 ? 7 : 0;
constexpr int kTurned = 2 * kLanes;  // keys whose words are turned together
constexpr int kQueriesAtOnce = 4;  // queries that share what is read
constexpr int kVectorsOfValue = kLanes == 16 ? 4 : 2;  // of numbers that are summed at once

// Up to kTurned keys [count, words] with rows made columns: [words][kTurned], the last key again behind them. A word has
// four bytes; their number is a multiple of 4.
static inline void turn_keys(const float* keys, int words, int count, float* out) {
  for (int part = 0; part < kTurned; part += kLanes) {
    const float* rows[kLanes];
    for (int each = 0; each < kLanes; ++each) rows[each] = keys + size_t(std::min(part + each, count - 1)) * words;
    for (int word = 0; word < words; word += 4) {
      float* to = out + word * kTurned + part;
#if defined(__AVX512F__)
      const auto four = [&](int row) {  // words of keys 4 apart
        const auto at = [&](int which) { return _mm_loadu_ps(rows[which] + word); };
        __m512 found = _mm512_castps128_ps512(at(row));
        found = _mm512_mask_broadcast_f32x4(found, 0x00f0, at(row + 4));
        found = _mm512_mask_broadcast_f32x4(found, 0x0f00, at(row + 8));
        return _mm512_mask_broadcast_f32x4(found, 0xf000, at(row + 12));
      };
      const __m512 first = four(0), second = four(1), third = four(2), fourth = four(3);
      const __m512d low[2] = {_mm512_castps_pd(_mm512_unpacklo_ps(first, second)), _mm512_castps_pd(_mm512_unpacklo_ps(third, fourth))};
      const __m512d high[2] = {_mm512_castps_pd(_mm512_unpackhi_ps(first, second)), _mm512_castps_pd(_mm512_unpackhi_ps(third, fourth))};
      _mm512_storeu_pd((double*)to, _mm512_unpacklo_pd(low[0], low[1]));
      _mm512_storeu_pd((double*)(to + kTurned), _mm512_unpackhi_pd(low[0], low[1]));
      _mm512_storeu_pd((double*)(to + 2 * kTurned), _mm512_unpacklo_pd(high[0], high[1]));
      _mm512_storeu_pd((double*)(to + 3 * kTurned), _mm512_unpackhi_pd(high[0], high[1]));
#elif defined(__AVX2__)
      const auto four = [&](int row) {
        const __m256 found = _mm256_castps128_ps256(_mm_loadu_ps(rows[row] + word));
        return _mm256_insertf128_ps(found, _mm_loadu_ps(rows[row + 4] + word), 1);
      };
      const __m256 first = four(0), second = four(1), third = four(2), fourth = four(3);
      const __m256d low[2] = {_mm256_castps_pd(_mm256_unpacklo_ps(first, second)), _mm256_castps_pd(_mm256_unpacklo_ps(third, fourth))};
      const __m256d high[2] = {_mm256_castps_pd(_mm256_unpackhi_ps(first, second)), _mm256_castps_pd(_mm256_unpackhi_ps(third, fourth))};
      _mm256_storeu_pd((double*)to, _mm256_unpacklo_pd(low[0], low[1]));
      _mm256_storeu_pd((double*)(to + kTurned), _mm256_unpackhi_pd(low[0], low[1]));
      _mm256_storeu_pd((double*)(to + 2 * kTurned), _mm256_unpacklo_pd(high[0], high[1]));
      _mm256_storeu_pd((double*)(to + 3 * kTurned), _mm256_unpackhi_pd(high[0], high[1]));
#else
      for (int each = 0; each < kLanes; ++each)
        for (int next = 0; next < 4; ++next) to[next * kTurned + each] = rows[each][word + next];
#endif
    }
  }
}

// A word of keys times a query's, added to what is there: a number, or two in bfloat16 where `Pairs`.
template <bool Pairs>
static inline Lanes add_product(Lanes keys, Lanes query, Lanes sum) {
#if defined(__AVX512BF16__)
  if constexpr (Pairs) return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)keys, (__m512bh)query);
#endif
  return fma(keys, query, sum);
}

// Scores of turned keys and Q queries [Q][words]: [Q][kTurned], rows so many numbers apart.
template <bool Pairs, int Q>
static inline void score_turned(const float* turned, int words, const float* queries, float* out, int stride) {
  Lanes sums[Q][2] = {};
  for (int word = 0; word < words; ++word) {
    const Lanes first = load(turned + word * kTurned), second = load(turned + word * kTurned + kLanes);
    for (int each = 0; each < Q; ++each) {
      const Lanes query = all(queries[each * words + word]);
      sums[each][0] = add_product<Pairs>(first, query, sums[each][0]);
      sums[each][1] = add_product<Pairs>(second, query, sums[each][1]);
    }
  }
  for (int each = 0; each < Q; ++each)
    for (int half = 0; half < 2; ++half) store(out + each * stride + half * kLanes, sums[each][half]);
}

// Call `work(first, number as a constant)` for some queries, at most kQueriesAtOnce at a time.
template <class Work>
static inline void for_queries(int queries, Work work) {
  int first = 0;
  for (; first + kQueriesAtOnce <= queries; first += kQueriesAtOnce) work(first, std::integral_constant<int, kQueriesAtOnce>());
  if (queries - first == 3) work(first, std::integral_constant<int, 3>());
  else if (queries - first == 2) work(first, std::integral_constant<int, 2>());
  else if (queries - first == 1) work(first, std::integral_constant<int, 1>());
}

// Scores of turned keys [words][kTurned] and some queries [queries][words]: [queries][stride].
template <bool Pairs>
static inline void score_queries(const float* turned, int words, const float* query, int queries, float* out, int stride) {
  for_queries(queries, [&](int each, auto together) {
    score_turned<Pairs, together.value>(turned, words, query + each * words, out + each * stride, stride);
  });
}

// The value of a position, and the weights that queries give it, so many numbers apart.
struct Shared {
  const float* value;
  const float* weights;
  int step;
};

// Add to Q rows of `out` what two lists of at most 32 positions sum to, at some vectors of numbers.
template <int Q, int Vectors>
static inline void mix_part(const std::vector<Shared>* sides, int query, int from, float* out, int width) {
  Lanes sums[2][Q][Vectors] = {};
  for (int side = 0; side < 2; ++side) {
    Lanes own[Q][Vectors] = {};
    for (const Shared& one : sides[side]) {
      Lanes numbers[Vectors];
      for (int at = 0; at < Vectors; ++at) numbers[at] = load(one.value + from + at * kLanes);
      for (int each = 0; each < Q; ++each) {
        const Lanes weight = all(one.weights[(query + each) * one.step]);
        for (int at = 0; at < Vectors; ++at) own[each][at] = fma(numbers[at], weight, own[each][at]);
      }
    }
    std::memcpy(sums[side], own, sizeof own);
  }
  for (int each = 0; each < Q; ++each)
    for (int at = 0; at < Vectors; ++at) {
      float* to = out + (query + each) * width + from + at * kLanes;
      store(to, load(to) + (sums[0][each][at] + sums[1][each][at]));
    }
}

// Add to out [queries][width] what two lists of at most 32 positions sum to: even ones, odd ones.
static inline void mix_queries(const std::vector<Shared>* sides, int width, int queries, float* out) {
  for_queries(queries, [&](int query, auto together) {
    int from = 0;
    for (; from + kVectorsOfValue * kLanes <= width; from += kVectorsOfValue * kLanes)
      mix_part<together.value, kVectorsOfValue>(sides, query, from, out, width);
    for (; from < width; from += kLanes) mix_part<together.value, 1>(sides, query, from, out, width);
  });
}

// The sum of weights of a tile, in the order of tiles.h: every fourth, then those four.
static inline float total_of(const float* weights) {
  typedef float Four __attribute__((vector_size(16)));
  Four sums = {};
  for (int at = 0; at < kTile; at += 4) {
    Four next;
    std::memcpy(&next, weights + at, sizeof next);
    sums += next;
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}
