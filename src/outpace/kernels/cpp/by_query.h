// Attention with a query in each lane of a vector, and its products.
#pragma once
#include "amx.h"

constexpr int kKeysAtOnce = 8, kNumbersAtOnce = 8;  // enough independent sums to keep a core busy
// Vectors of queries that share what is read of a key or value, 4 keys or numbers at a time. AVX2 broadcasts a number by
// an instruction of its own, and has registers for 12 sums; NEON has them for 16, and short vectors; AVX-512 broadcasts
// within a product.
constexpr int kVectorsAtOnce = kLanes == 16 ? 1 : kLanes == 8 ? 3 : 4, kSharedAtOnce = 4;

// Numbers of keys by words of 32 bits: one in float32, or two in bfloat16.
struct SingleNumbers {
  template <int Index>
  static Lanes add(Lanes sum, const float* queries, Words keys) { return add_float<Index>(sum, load(queries), keys); }
  static Lanes add_one(Lanes sum, const float* queries, const float* key) { return fma(all(*key), load(queries), sum); }
};

#if defined(__aarch64__) && OUTPACE_BFDOT
constexpr bool kReadsPairs = true;  // of keys, where lanes are queries
struct NumberPairs {
  template <int Index>
  static Lanes add(Lanes sum, const float* queries, Words keys) {
    return (Lanes)BfloatPairs::add<Index>((float32x4_t)sum, vld1q_u8((const uint8_t*)queries), keys);
  }
  static Lanes add_one(Lanes sum, const float* queries, const float* key) {
    Words words = {};
    std::memcpy(&words, key, sizeof *key);
    return add<0>(sum, queries, words);
  }
};
#else
constexpr bool kReadsPairs = false;
typedef SingleNumbers NumberPairs;
#endif
// Scores of `count` keys [count][words] and V vectors of queries [V][words][kLanes]: [count, up to a multiple of K][kLanes]
// each, with `step` numbers from a vector's scores to the next one's. K keys share what is read of queries.
template <class Numbers, int V, int K>
static inline void score_keys(const float* keys, int words, int count, const float* queries, float* out, int step) {
  for (int first = 0; first < count; first += K) {
    const float* key[K];
    for (int each = 0; each < K; ++each) key[each] = keys + size_t(std::min(first + each, count - 1)) * words;
    Lanes sums[V][K] = {};
    int d = 0;
    for (; d + kWords <= words; d += kWords) {
      Words own[K];
      for (int each = 0; each < K; ++each) own[each] = load_words(key[each] + d);
      for_each<kWords>([&](auto index) INLINE {
        for (int each = 0; each < K; ++each)
          for (int v = 0; v < V; ++v)
            sums[v][each] = Numbers::template add<index>(sums[v][each], queries + (v * words + d + index) * kLanes, own[each]);
      });
    }
    for (; d < words; ++d)
      for (int each = 0; each < K; ++each)
        for (int v = 0; v < V; ++v) sums[v][each] = Numbers::add_one(sums[v][each], queries + (v * words + d) * kLanes, key[each] + d);
    for (int v = 0; v < V; ++v)
      for (int each = 0; each < K; ++each) store(out + v * step + (first + each) * kLanes, sums[v][each]);
  }
}

// Add to out [width][kLanes] what two lists of at most 32 positions sum to: even ones, odd ones.
static inline void mix_values(const std::vector<Weighted>* sides, int width, float* out) {
  for (int from = 0; from < width; from += kNumbersAtOnce) {
    const int count = std::min(kNumbersAtOnce, width - from);
    Lanes sums[2][kNumbersAtOnce] = {};
    for (int side = 0; side < 2; ++side)
      for (const Weighted& one : sides[side]) {
        const Lanes weights = load(one.weights);
        if (count == kNumbersAtOnce)
          for_each<kNumbersAtOnce>([&](auto d) INLINE {
            const Words numbers = load_words(one.value + from + d / kWords * kWords);
            sums[side][d] = add_float<d % kWords>(sums[side][d], weights, numbers);
          });
        else
          for (int d = 0; d < count; ++d) sums[side][d] = fma(all(one.value[from + d]), weights, sums[side][d]);
      }
    for (int d = 0; d < count; ++d) {
      float* own = out + (from + d) * kLanes;
      store(own, load(own) + (sums[0][d] + sums[1][d]));
    }
  }
}

// The same for V vectors of queries and `count` positions in order, at most 32: out [V][width + 2][kLanes]; weights with
// `step` numbers from a vector's to the next one's. Width is a multiple of 4.
template <int V>
static inline void mix_shared(const float* values, int count, int width, const float* weights, int step, float* out) {
  for (int from = 0; from < width; from += kSharedAtOnce) {
    Lanes sums[2][V][kSharedAtOnce];
    for (int side = 0; side < 2; ++side) {
      Lanes own[V][kSharedAtOnce] = {};
      for (int at = side; at < count; at += 2) {
        Lanes shares[V];
        for (int v = 0; v < V; ++v) shares[v] = load(weights + v * step + at * kLanes);
        for_each<kSharedAtOnce>([&](auto d) INLINE {
          const Words numbers = load_words(values + size_t(at) * width + from + d / kWords * kWords);
          for (int v = 0; v < V; ++v) own[v][d] = add_float<d % kWords>(own[v][d], shares[v], numbers);
        });
      }
      std::memcpy(sums[side], own, sizeof own);
    }
    for (int v = 0; v < V; ++v)
      for (int d = 0; d < kSharedAtOnce; ++d) {
        float* to = out + (v * (width + 2) + from + d) * kLanes;
        store(to, load(to) + (sums[0][v][d] + sums[1][v][d]));
      }
  }
}

// Attends for a block that is open: `take_queries` once, then the sums over each span. The block outlives it.
template <class Number>
class ByQuery {
 public:
  explicit ByQuery(Block<Number>& block) : block_(block) {}

  bool uses_amx() const { return !kIsFloats && block_.width % 32 == 0 && has_amx(); }

  // Read the queries of the block.
  void take_queries() {
    amx_ = uses_amx(), pairs_ = !kIsFloats && (amx_ || (kReadsPairs && block_.width % 2 == 0));
    words_ = pairs_ ? block_.width / 2 : block_.width;
    block_.read_queries(pairs_, words_, 1, kLanes, query_);
  }

  // Sums over one span.
  void attend(int span, float* sums) {
    const Tiles shapes(amx_);
    const int vectors = block_.vectors;
    block_.attend(span, sums, [&] {
      read_tile();
      int v = 0;
      if constexpr (kVectorsAtOnce > 1)
        if (!block_.has_tail && block_.width % kSharedAtOnce == 0) {
          for (; v + kVectorsAtOnce <= vectors; v += kVectorsAtOnce) add_tile<kVectorsAtOnce>(v, sums);
          if (v + 2 <= vectors) add_tile<2>(v, sums), v += 2;
        }
      for (; v < vectors; ++v) add_tile<1>(v, sums);
    });
  }

  // Add the sums over a span to those over the spans before it.
  void add(const float* later, float* sums) const {
    const int numbers = block_.width * kLanes;
    block_.add(later, sums, [&](int, Lanes before, Lanes after, const float* from, float* to) {
      for (int at = 0; at < numbers; at += kLanes) store(to + at, fma(load(from + at), after, load(to + at) * before));
    });
  }

  // What all spans sum to becomes the rows' results.
  void close(const float* sums) const { block_.close(sums, 1, kLanes); }

 private:
  static constexpr bool kIsFloats = Block<Number>::kIsFloats, kIsBytes = Block<Number>::kIsBytes;

  // Read the tile's keys and values as the products need them.
  void read_tile() {
    const int in_order = block_.rows_in_order;
    keys_ = block_.as_words(block_.keys, in_order, pairs_, key_room_);
    if (block_.has_tail) tail_keys_ = block_.as_words(block_.tail_keys, block_.tail_rows, pairs_, tail_key_room_);
    turned_halves_ = !amx_ ? 0 : block_.has_tail ? in_order / kSummed : (in_order + kSummed - 1) / kSummed;
    if constexpr (!kIsFloats)
      if (turned_halves_ > 0) half_values_ = block_.widened(block_.values, in_order, half_value_room_);
    if (turned_halves_ * kSummed < in_order) block_.widen_values();
  }

  // Add the tile to the sums of V vectors of queries.
  template <int V>
  void add_tile(int v, float* sums) {
    score<V>(v);
    const bool hides = block_.hides();
    for (int each = 0; each < V; ++each) {
      const Sums own = sums_at(sums, v + each, block_.width);
      float* scores = scores_ + each * kTile * kLanes;
      if (amx_) hides ? weigh<true, true>(v + each, scores, own) : weigh<true, false>(v + each, scores, own);
      else hides ? weigh<false, true>(v + each, scores, own) : weigh<false, false>(v + each, scores, own);
    }
    const int width = block_.width, in_order = block_.rows_in_order;
    float* values = sums_at(sums, v, width).values;
    if constexpr (V > 1)
      for (int from = 0; from < in_order; from += kSummed)
        mix_shared<V>(block_.wide_values + size_t(from) * width, std::min(kSummed, in_order - from), width,
                      scores_ + from * kLanes, kTile * kLanes, values);
    else mix(v, values);
  }

  // Scores of a tile: of what is stored in order for all queries at once, of the rest by the rows that each sees.
  template <int V>
  void score(int v) {
    score_rows<V>(keys_, block_.key_scales, block_.rows_in_order, v, scores_);
    if (V == 1 && block_.has_tail) {
      tail_scores_.resize(size_t(block_.tail_rows + 16) * kLanes);
      score_rows<1>(tail_keys_, block_.tail_key_scales, block_.tail_rows, v, tail_scores_.data());
      block_.place_tail(v, in_lanes(tail_scores_.data()), in_lanes(scores_));
    }
    block_.cap(scores_, V * kTile * kLanes);
  }

  // Scores of keys and V vectors of queries; `scales`: of int8.
  template <int V>
  void score_rows(const float* keys, const float* scales, int count, int v, float* out) const {
    constexpr int keys_at_once = V > 1 ? kSharedAtOnce : kKeysAtOnce, step = kTile * kLanes;
    const float* query = &query_[size_t(v) * words_ * kLanes];
#if OUTPACE_AMX
    if (amx_) score_tiles((const uint16_t*)keys, block_.width, count, (const uint16_t*)query, out);
    else
#endif
    if (pairs_) score_keys<NumberPairs, V, keys_at_once>(keys, words_, count, query, out, step);
    else score_keys<SingleNumbers, V, keys_at_once>(keys, words_, count, query, out, step);
    for (int each = 0; kIsBytes && each < V; ++each, out += step)
      for (int at = 0; at < count; ++at) store(out + at * kLanes, load(out + at * kLanes) * scales[at]);
  }

  static Scores in_lanes(float* scores) { return {scores, kLanes, 1}; }

  // Scores become weights, relative to the largest score so far. Kinds: whether they are rounded to bfloat16, for AMX;
  // whether some queries do not see all positions of the tile.
  template <bool Rounds, bool Hides>
  void weigh(int v, float* scores, const Sums& sums) {
    const Lanes factor = block_.factor();
    const int tile = block_.tile;
    const IntLanes low = bits_at<IntLanes>(&block_.low[v * kLanes]), end = bits_at<IntLanes>(&block_.end[v * kLanes]);
    const auto seen = [&](int at, Lanes number, float otherwise) {
      if constexpr (!Hides) return number;
      const IntLanes position = IntLanes{} + (tile + at);
      return (position >= low) & (position < end) ? number : all(otherwise);
    };
    Lanes best[4] = {all(kHidden), all(kHidden), all(kHidden), all(kHidden)};
    for (int at = 0; at < kTile; at += 4)
      for (int each = 0; each < 4; ++each)
        best[each] = larger(best[each], seen(at + each, load(scores + (at + each) * kLanes), kHidden));
    const Lanes highest = larger(larger(best[0], best[1]), larger(best[2], best[3]));
    const Lanes most = sums.raise(highest * factor, [&](Lanes less) {
      const int numbers = block_.width * kLanes;
      for (int at = 0; at < numbers; at += kLanes) store(sums.values + at, load(sums.values + at) * less);
    });
    Lanes total[4] = {};
    for (int at = 0; at < kTile; at += 4) {
      Lanes weights[4];
      for (int each = 0; each < 4; ++each) {
        float* own = scores + (at + each) * kLanes;
        const Lanes power = power_of_two<Rounds>(fma(load(own), factor, -most));
        weights[each] = seen(at + each, Rounds ? as_bfloat16(power) : power, 0);
        total[each] += weights[each];
        if constexpr (kIsBytes) weights[each] = Block<Number>::scaled(weights[each], block_.value_scales[at + each], Rounds);
        store(own, weights[each]);
      }
      for (int each = 0; Rounds && each < 4; each += 2) {
        const BitLanes both = (BitLanes)weights[each] >> 16 | (BitLanes)weights[each + 1];
        std::memcpy(weights_ + (at + each) * kLanes, &both, sizeof both);
      }
    }
    store(sums.total, load(sums.total) + ((total[0] + total[1]) + (total[2] + total[3])));
  }

  // Add the tile's values, weighted.
  void mix(int v, float* out) {
#if OUTPACE_AMX
    if (turned_halves_ > 0) {
      if (v == 0) turn();
      mix_tiles(turned_values_.data(), block_.width, turned_halves_, weights_, out);
    }
#endif
    block_.mix(v, in_lanes(scores_), turned_halves_, amx_, [&](const std::vector<Weighted>* sides) {
      mix_values(sides, block_.width, out);
    });
  }

#if OUTPACE_AMX
  void turn() {
    const int width = block_.width;
    turned_values_.resize(kTile * width);
    for (int half = 0; half < turned_halves_; ++half) {
      const size_t at = size_t(half) * kSummed * width;
      turn_values(half_values_ + at, width, std::min(kSummed, block_.rows_in_order - half * kSummed), &turned_values_[at]);
    }
  }
#endif

  Block<Number>& block_;
  bool amx_ = false, pairs_ = false;
  int words_ = 0;             // of a key, as its products read it
  std::vector<float> query_;  // by vector [words][kLanes]
  const float *keys_ = nullptr, *tail_keys_ = nullptr;
  typename Block<Number>::Room key_room_, tail_key_room_;
  std::vector<float> tail_scores_;
  int turned_halves_ = 0;  // halves of the tile whose values are turned for AMX
  const uint16_t* half_values_ = nullptr;
  std::vector<uint16_t> half_value_room_, turned_values_;  // turned: [halves][width][kSummed]
  alignas(64) float scores_[kVectorsAtOnce * kTile * kLanes] = {};
  alignas(64) uint16_t weights_[kTile * kLanes] = {};
};
