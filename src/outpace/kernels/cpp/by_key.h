// Attention with a key in each lane of a vector for scores, and a number of a value in each lane for sums: no lane is
// idle if a single row has few queries. Every sum has the order, and the bits, of by_query.h, where a lane is a query.
#pragma once
#include "attention_block.h"

// Number of queries of a key head up to which this is faster than by_query.h. Measured: with AVX-512 for all numbers,
// with AVX2 if the queries do not fill a vector. NEON was not measured.
constexpr int kMostByKey = kLanes == 16 ? INT32_MAX : kLanes == 8 ? 7 : 0;
constexpr int kTurned = kLanes == 16 ? 64 : 2 * kLanes;  // keys whose words are turned together
// Queries that share what is read: with AVX-512, 6 and 4 vectors of keys make 24 sums of 32 registers.
constexpr int kScoredAtOnce = kLanes == 16 ? 6 : 4, kMixedAtOnce = 4;
constexpr int kVectorsOfValue = kLanes == 16 ? 4 : 2;  // of numbers that are summed at once

#if defined(__AVX512BW__)
// Words of keys 4 apart, one key to 16 bytes, and what is unpacked of two such vectors.
static inline Lanes four_words(const float* const* keys, int word) {
  __m512 found = _mm512_castps128_ps512(_mm_loadu_ps(keys[0] + word));
  found = _mm512_mask_broadcast_f32x4(found, 0x00f0, _mm_loadu_ps(keys[4] + word));
  found = _mm512_mask_broadcast_f32x4(found, 0x0f00, _mm_loadu_ps(keys[8] + word));
  return (Lanes)_mm512_mask_broadcast_f32x4(found, 0xf000, _mm_loadu_ps(keys[12] + word));
}
static inline Lanes low_words(Lanes a, Lanes b) { return (Lanes)_mm512_unpacklo_ps((__m512)a, (__m512)b); }
static inline Lanes high_words(Lanes a, Lanes b) { return (Lanes)_mm512_unpackhi_ps((__m512)a, (__m512)b); }
static inline Lanes low_pairs(Lanes a, Lanes b) { return (Lanes)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); }
static inline Lanes high_pairs(Lanes a, Lanes b) { return (Lanes)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); }
#elif defined(__AVX2__)
static inline Lanes four_words(const float* const* keys, int word) {
  const __m256 found = _mm256_castps128_ps256(_mm_loadu_ps(keys[0] + word));
  return (Lanes)_mm256_insertf128_ps(found, _mm_loadu_ps(keys[4] + word), 1);
}
static inline Lanes low_words(Lanes a, Lanes b) { return (Lanes)_mm256_unpacklo_ps((__m256)a, (__m256)b); }
static inline Lanes high_words(Lanes a, Lanes b) { return (Lanes)_mm256_unpackhi_ps((__m256)a, (__m256)b); }
static inline Lanes low_pairs(Lanes a, Lanes b) { return (Lanes)_mm256_unpacklo_pd((__m256d)a, (__m256d)b); }
static inline Lanes high_pairs(Lanes a, Lanes b) { return (Lanes)_mm256_unpackhi_pd((__m256d)a, (__m256d)b); }
#endif

// Up to kTurned keys [count, words] with rows made columns: [words][kTurned], the last key again behind them up to half of
// these or all. A word has four bytes; their number is a multiple of 4.
static inline void turn_keys(const float* keys, int words, int count, float* out) {
  for (int part = 0; part < (count > kTurned / 2 ? kTurned : kTurned / 2); part += kLanes) {
    const float* rows[kLanes];
    for (int each = 0; each < kLanes; ++each) rows[each] = keys + size_t(std::min(part + each, count - 1)) * words;
    for (int word = 0; word < words; word += 4) {
      float* to = out + word * kTurned + part;
#if defined(__AVX2__)
      const Lanes first = four_words(rows, word), second = four_words(rows + 1, word);
      const Lanes third = four_words(rows + 2, word), fourth = four_words(rows + 3, word);
      const Lanes low[2] = {low_words(first, second), low_words(third, fourth)};
      const Lanes high[2] = {high_words(first, second), high_words(third, fourth)};
      store(to, low_pairs(low[0], low[1])), store(to + kTurned, high_pairs(low[0], low[1]));
      store(to + 2 * kTurned, low_pairs(high[0], high[1])), store(to + 3 * kTurned, high_pairs(high[0], high[1]));
#else
      for (int each = 0; each < kLanes; ++each)
        for (int next = 0; next < 4; ++next) to[next * kTurned + each] = rows[each][word + next];
#endif
    }
  }
}

// Add products of keys' numbers and one number of each of Q queries, `width` apart.
template <int Vectors, int Q>
static inline void add_products(const Lanes* keys, const float* queries, int width, Lanes (*sums)[Vectors]) {
  for (int each = 0; each < Q; ++each) {
    const Lanes query = all(queries[each * width]);
    for (int at = 0; at < Vectors; ++at) sums[each][at] = fma(keys[at], query, sums[each][at]);
  }
}

// Scores of some vectors of turned keys and Q queries [Q][width]: [Q][Vectors * kLanes], rows so many numbers apart. A word
// is a number, or two in bfloat16 where `Pairs`, which become float32 as in by_query.h: queries are not rounded.
template <bool Pairs, int Vectors, int Q>
static inline void score_turned(const float* turned, int width, const float* queries, float* out, int stride) {
  Lanes sums[Q][Vectors] = {};
  for (int d = 0; d < width; d += Pairs ? 2 : 1, turned += kTurned) {
    Lanes keys[Vectors];
    for (int at = 0; at < Vectors; ++at) {
      keys[at] = load(turned + at * kLanes);
      if constexpr (Pairs) keys[at] = (Lanes)((BitLanes)keys[at] << 16);
    }
    add_products<Vectors, Q>(keys, queries + d, width, sums);
    if constexpr (!Pairs) continue;
    for (int at = 0; at < Vectors; ++at) keys[at] = (Lanes)((BitLanes)load(turned + at * kLanes) & 0xffff0000u);
    add_products<Vectors, Q>(keys, queries + d + 1, width, sums);
  }
  for (int each = 0; each < Q; ++each)
    for (int at = 0; at < Vectors; ++at) store(out + each * stride + at * kLanes, sums[each][at]);
}

// Call `work(first, number as a constant)` for some queries, at most `Most` at a time.
template <int Most, class Work>
static inline void for_queries(int queries, Work work, int first = 0) {
  for (; first + Most <= queries; first += Most) work(first, std::integral_constant<int, Most>());
  if constexpr (Most > 1) for_queries<Most - 1>(queries, work, first);
}

// Scores of turned keys, half of kTurned or all, and some queries [queries][width]: [queries][stride].
template <bool Pairs>
static inline void score_queries(const float* turned, int width, int count, const float* query, int queries, float* out,
                                 int stride) {
  for_queries<kScoredAtOnce>(queries, [&](int each, auto together) {
    constexpr int all_of = kTurned / kLanes, half = all_of / 2;
    const float* own = query + each * width;
    if (count > kTurned / 2) score_turned<Pairs, all_of, together.value>(turned, width, own, out + each * stride, stride);
    else score_turned<Pairs, half, together.value>(turned, width, own, out + each * stride, stride);
  });
}

// Add to Q rows of `out` what two lists of at most 32 positions sum to, at some vectors of numbers.
template <int Q, int Vectors>
static inline void mix_part(const std::vector<Weighted>* sides, int query, int from, float* out, int width) {
  Lanes sums[2][Q][Vectors];
  for (int side = 0; side < 2; ++side) {
    Lanes own[Q][Vectors] = {};
    for (const Weighted& one : sides[side]) {
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
static inline void mix_queries(const std::vector<Weighted>* sides, int width, int queries, float* out) {
  for_queries<kMixedAtOnce>(queries, [&](int query, auto together) {
    int from = 0;
    for (; from + kVectorsOfValue * kLanes <= width; from += kVectorsOfValue * kLanes)
      mix_part<together.value, kVectorsOfValue>(sides, query, from, out, width);
    for (; from < width; from += kLanes) mix_part<together.value, 1>(sides, query, from, out, width);
  });
}

// The sum of weights of a tile, in the order of by_query.h: every fourth, then those four.
static inline float total_of(const float* weights) {
  typedef float Four __attribute__((vector_size(16)));
  Four sums = {};
  for (int at = 0; at < kTile; at += 4) sums += bits_at<Four>(weights + at);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Attends for a block that is open: `take_queries` once, then the sums over each span. The block outlives it.
template <class Number>
class ByKey {
 public:
  explicit ByKey(Block<Number>& block) : block_(block) {}

  // Whether it takes all queries of the block, faster than by_query.h without AMX does.
  bool is_faster() const { return block_.queries <= kMostByKey && block_.width % kLanes == 0; }

  // Read the queries of the block.
  void take_queries() { block_.read_queries(false, block_.width, block_.width, 1, query_); }

  // Sums over one span.
  void attend(int span, float* sums) {
    block_.attend(span, sums, [&] {
      read_tile();
      for (int v = 0; v < block_.vectors; ++v) {
        const Sums own = sums_at(sums, v, block_.width);
        score(v);
        weigh(v, own);
        block_.mix(v, in_rows(scores_, kTile), 0, false, [&](const std::vector<Weighted>* sides) {
          mix_queries(sides, block_.width, block_.lanes_of(v), own.values);
        });
      }
    });
  }

  // Add the sums over a span to those over the spans before it.
  void add(const float* later, float* sums) const {
    block_.add(later, sums, [&](int v, Lanes before, Lanes after, const float* from, float* to) {
      for_values(v, [&](int lane, int at) {
        store(to + at, fma(load(from + at), all(after[lane]), load(to + at) * before[lane]));
      });
    });
  }

  // What all spans sum to becomes the rows' results.
  void close(const float* sums) const { block_.close(sums, block_.width, 1); }

 private:
  static constexpr bool kIsBytes = Block<Number>::kIsBytes, kPairs = !Block<Number>::kIsFloats;

  static Scores in_rows(float* scores, int stride) { return {scores, 1, stride}; }

  // Do `work(lane, at)` for all sums of values of a vector's queries.
  template <class Work>
  void for_values(int v, Work work) const {
    const int width = block_.width;
    for (int lane = 0; lane < block_.lanes_of(v); ++lane)
      for (int at = lane * width; at < (lane + 1) * width; at += kLanes) work(lane, at);
  }

  // Read the tile's keys and values as the products need them.
  void read_tile() {
    turn(block_.keys, block_.rows_in_order, turned_keys_);
    if (block_.has_tail) turn(block_.tail_keys, block_.tail_rows, turned_tail_);
    block_.widen_values();
  }

  int words() const { return kPairs ? block_.width / 2 : block_.width; }  // of a key

  void turn(const Number* stored, int count, std::vector<float>& turned) {
    const float* keys = block_.as_words(stored, count, kPairs, key_room_);
    const int blocks = (count + kTurned - 1) / kTurned;
    turned.resize(size_t(blocks) * kTurned * words());
    for (int at = 0; at < count; at += kTurned)
      turn_keys(keys + size_t(at) * words(), words(), count - at, &turned[size_t(at) * words()]);
  }

  // Scores of the tile: of what is stored in order for all queries at once, of the rest by the rows that each sees.
  void score(int v) {
    score_rows(turned_keys_.data(), block_.key_scales, block_.rows_in_order, v, scores_, kTile);
    if (block_.has_tail) {
      const int stride = (block_.tail_rows + kTurned - 1) / kTurned * kTurned;
      tail_scores_.resize(size_t(kLanes) * stride);
      score_rows(turned_tail_.data(), block_.tail_key_scales, block_.tail_rows, v, tail_scores_.data(), stride);
      block_.place_tail(v, in_rows(tail_scores_.data(), stride), in_rows(scores_, kTile));
    }
    block_.cap(scores_, block_.lanes_of(v) * kTile);
  }

  // Scores of turned keys and a vector's queries, rows so many numbers apart; `scales`: of int8.
  void score_rows(const float* turned, const float* scales, int count, int v, float* out, int stride) const {
    const float* query = &query_[size_t(v) * block_.width * kLanes];
    const int queries = block_.lanes_of(v);
    for (int at = 0; at < count; at += kTurned, turned += kTurned * words())
      score_queries<kPairs>(turned, block_.width, count - at, query, queries, out + at, stride);
    for (int lane = 0; kIsBytes && lane < queries; ++lane)
      for (int at = 0; at < count; ++at) out[lane * stride + at] *= scales[at];
  }

  // Scores become weights, relative to the largest score so far.
  void weigh(int v, const Sums& sums) {
    const int queries = block_.lanes_of(v), tile = block_.tile;
    const int *low = &block_.low[v * kLanes], *end = &block_.end[v * kLanes];
    const bool hides = block_.hides();
    const Lanes factor = block_.factor();
    const auto seen = [&](int query, int at, Lanes number, float otherwise) {
      if (!hides) return number;
      IntLanes position;
      for (int lane = 0; lane < kLanes; ++lane) position[lane] = tile + at + lane;
      return (position >= low[query]) & (position < end[query]) ? number : all(otherwise);
    };
    alignas(64) float best[kLanes];
    store(best, all(kHidden));
    for (int query = 0; query < queries; ++query) {
      Lanes own = all(kHidden);
      for (int at = 0; at < kTile; at += kLanes) own = larger(own, seen(query, at, load(scores_ + query * kTile + at), kHidden));
      best[query] = largest(own);
    }
    const Lanes most = sums.raise(load(best) * factor, [&](Lanes less) {
      for_values(v, [&](int lane, int at) { store(sums.values + at, load(sums.values + at) * less[lane]); });
    });
    for (int query = 0; query < queries; ++query) {
      float* own = scores_ + query * kTile;
      for (int at = 0; at < kTile; at += kLanes)
        store(own + at, seen(query, at, power_of_two(fma(load(own + at), factor, all(-most[query]))), 0));
      sums.total[query] += total_of(own);
      for (int at = 0; kIsBytes && at < kTile; at += kLanes) store(own + at, load(own + at) * load(block_.value_scales + at));
    }
  }

  Block<Number>& block_;
  std::vector<float> query_;  // by vector [kLanes][width]
  typename Block<Number>::Room key_room_;
  std::vector<float> turned_keys_, turned_tail_, tail_scores_;
  alignas(64) float scores_[kLanes * kTile] = {};  // by query
};
