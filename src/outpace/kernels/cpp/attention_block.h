// What both ways to attend share (by_query.h, by_key.h): some rows of a part, the positions that they see, and a tile of
// those.
//
// A score is one sum over the numbers of a key in their order. A weighted sum of values takes 32 positions at a time:
// those of even positions in their order, those of odd ones, and both sums in order are added to what is there. That is
// the order of AMX, and all code keeps it, because rows of a tree are summed without AMX everywhere. A weight of zero
// changes no sum.
#pragma once
#include <type_traits>
#include <vector>

#include "neon.h"
#include "slots.h"

constexpr int kTile = 64;    // positions between two looks at the largest score
constexpr int kSummed = 32;  // positions summed before they are added
constexpr int kSpan = 512;   // positions of a partial sum
// Scores that no key has: a lower bound of all, and the score of hidden keys, whose weight is then 0.
constexpr float kLowest = -1e20f, kHidden = -3e38f;

// 2^x for x up to 126, and 2^-126 below that, with an error of 2^-23; with `Roughly` an error of 2^-13, which is less
// than rounding to bfloat16 causes.
template <bool Roughly = false>
static inline Lanes power_of_two(Lanes x) {
  x = larger(x, all(-126.0f));
  const Lanes moved = x + 12582912.0f, rest = x - (moved - 12582912.0f);  // to where the last bit is a one
  Lanes p;
  if constexpr (Roughly) {
    p = fma(all(5.5008254e-2f), rest, all(2.4221098e-1f));
    p = fma(p, rest, all(6.9328303e-1f));
  } else {
    p = fma(all(1.3264700e-3f), rest, all(9.6715100e-3f));
    p = fma(p, rest, all(5.5507340e-2f));
    p = fma(p, rest, all(2.4022242e-1f));
    p = fma(p, rest, all(6.9314698e-1f));
  }
  p = fma(p, rest, all(1.0f));
  return (Lanes)((BitLanes)p + ((BitLanes)moved << 23));
}

// The nearest numbers of bfloat16; of two as near the larger one.
static inline Lanes as_bfloat16(Lanes x) { return (Lanes)(((BitLanes)x + 0x8000u) & 0xffff0000u); }

#if defined(__AVX512BF16__) || (defined(__aarch64__) && OUTPACE_BFDOT)
// Put one query into places so many apart, as into its lane of a vector [width / 2][kLanes]: two numbers in bfloat16 each.
static inline void take_pairs(const float* query, int width, float* to, int step) {
#if defined(__aarch64__)
  for (int d = 0; d < width; d += 2, to += step) {
    const uint16_t pair[2] = {to_bfloat16(query[d]), to_bfloat16(query[d + 1])};
    std::memcpy(to, pair, sizeof pair);
  }
#else
  for (int d = 0; d < width; d += kLanes) {
    const int count = std::min(kLanes, width - d);
    const __m512 numbers = _mm512_maskz_loadu_ps(__mmask16((1 << count) - 1), query + d);
    float pairs[kLanes / 2];
    _mm256_storeu_si256((__m256i*)pairs, (__m256i)_mm512_cvtneps_pbh(numbers));
    for (int pair = 0; pair < count / 2; ++pair) to[(d / 2 + pair) * step] = pairs[pair];
  }
#endif
}
#else
static inline void take_pairs(const float*, int, float*, int) {}
#endif

// Attention of one layer of a pass.
struct Attention {
  Store kv;
  const Part* parts;
  int32_t part_count, layer, heads, kv_heads;
  Sight sight;
  const float* query;  // [rows, heads, head_dim], `spread`, rows so many numbers apart
  float* out;
  int32_t query_stride, out_stride;
};

// Sums over a span of positions by vector of queries.
struct Sums {
  float* values;        // [head_dim][kLanes] by query, [kLanes][head_dim] by key
  float *most, *total;  // [kLanes]: the largest score and the weights

  // Make sums relative to a score, if it is the largest so far; `scale(factors)` does it for those of values.
  template <class Scale>
  Lanes raise(Lanes score, Scale scale) const {
    const Lanes before = load(most), raised = larger(before, score);
    if (std::memcmp(&raised, &before, sizeof before)) {
      const Lanes less = power_of_two(before - raised);
      store(most, raised), store(total, load(total) * less);
      scale(less);
    }
    return raised;
  }
};

static inline Sums sums_at(float* base, int vector, int width) {
  float* own = base + size_t(vector) * (width + 2) * kLanes;
  return {own, own + width * kLanes, own + (width + 1) * kLanes};
}

// Scores of some positions and a vector's queries, which become weights.
struct Scores {
  float* first;
  int by_position, by_query;  // strides

  float& at(int position, int query) const { return first[position * by_position + query * by_query]; }
};

// The value of a position, and the weights of the queries for it, `step` numbers apart.
struct Weighted {
  const float* value;
  const float* weights;
  int step;
};

// Some rows of one part and key head, with the queries of all their heads, in vectors of kLanes queries each.
template <class Number>
class Block {
 public:
  static constexpr bool kIsFloats = std::is_same<Number, float>::value, kIsBytes = std::is_same<Number, int8_t>::value;

  // Rows converted from the stored type to the one that products read.
  struct Room {
    std::vector<float> floats;
    std::vector<uint16_t> halves;
  };

  int width = 0, queries = 0, vectors = 0;  // width: numbers of a head
  std::vector<int32_t> low, end;            // the positions that each query sees
  // The tile: its first position, and how many are stored in order for all queries.
  int tile = 0, rows_in_order = 0;
  const Number *keys = nullptr, *values = nullptr;
  const float* wide_values = nullptr;                      // of `widen_values`
  float key_scales[kTile] = {}, value_scales[kTile] = {};  // of int8
  // The tail: the rows from the first one that is not in order for all queries, and whether the tile reaches it.
  int tail_rows = 0;
  bool has_tail = false;
  const Number* tail_keys = nullptr;
  const float* tail_key_scales = nullptr;

  void open(const Attention& attention, int kv_head, const Part& part, int first, int rows) {
    const Store& kv = attention.kv;
    const size_t at = place(kv, attention.layer, part.slot, kv_head, 0);
    slot_keys_ = (const Number*)kv.keys + at, slot_values_ = (const Number*)kv.values + at;
    if (kIsBytes) slot_key_scales_ = kv.key_scales + at / kv.head_dim, slot_value_scales_ = kv.value_scales + at / kv.head_dim;
    attention_ = &attention, view_ = View(part, attention.layer, kv_head);
    width = kv.head_dim, group_ = attention.heads / attention.kv_heads, queries = rows * group_;
    vectors = (queries + kLanes - 1) / kLanes;
    first_row_ = part.start + first, first_number_ = size_t(kv_head) * group_ * width;
    look(part, first, rows);
  }

  int first_span() const { return first_low_ / kSpan; }
  int last_span() const { return std::max(first_span(), (last_end_ - 1) / kSpan); }
  int numbers() const { return vectors * (width + 2) * kLanes; }  // of sums
  int lanes_of(int v) const { return std::min(kLanes, queries - v * kLanes); }

  // Whether some queries do not see all positions of the tile.
  bool hides() const { return tile < last_low_ || tile + kTile > first_end_; }

  // What a score is multiplied by: its weight is then a power of two.
  Lanes factor() const { return all(attention_->sight.scaling * 1.44269504f); }

  // Queries as products read them, by vector, so far apart from one to the next and from word to word.
  void read_queries(bool in_pairs, int words, int by_query, int by_word, std::vector<float>& to) const {
    to.assign(size_t(vectors) * words * kLanes, 0);
    for (int each = 0; each < queries; ++each) {
      const size_t row = first_row_ + each / group_;
      const float* from = attention_->query + row * attention_->query_stride + first_number_ + each % group_ * width;
      float* own = &to[size_t(each / kLanes) * words * kLanes] + each % kLanes * by_query;
      if (in_pairs) take_pairs(from, width, own, by_word);
      else
        for (int d = 0; d < width; ++d) own[d * by_word] = from[d];
    }
  }

  // Sums over one span: `add_tile()` adds the tile to all of them.
  template <class AddTile>
  void attend(int span, float* sums, AddTile add_tile) {
    for (int v = 0; v < vectors; ++v) {
      const Sums own = sums_at(sums, v, width);
      std::memset(own.values, 0, sizeof(float) * width * kLanes);
      store(own.most, all(kLowest)), store(own.total, Lanes{});
    }
    const int from = std::max(span * kSpan, first_low_ / kTile * kTile), to = std::min((span + 1) * kSpan, last_end_);
    for (int at = from; at < to; at += kTile) {
      open_tile(at);
      add_tile();
    }
  }

  // Rows as floats or in bfloat16, converted into `room` if they are stored in another type. Products may read 15 rows
  // more.
  template <class Wide>
  const Wide* widened(const Number* rows, int count, std::vector<Wide>& room) const {
    if constexpr (std::is_same<Number, Wide>::value) {
      return rows;
    } else {
      const size_t numbers = size_t(count) * width;
      room.resize(std::max(room.size(), numbers + 15 * width));
      Wide* to = room.data();
      for (size_t at = 0; at < numbers; ++at) {
        if constexpr (std::is_same<Wide, float>::value) to[at] = as_float(rows[at]);
        else to[at] = exact_bfloat16(rows[at]);
      }
      return to;
    }
  }

  // Keys as the words that their products read.
  const float* as_words(const Number* rows, int count, bool in_pairs, Room& room) const {
    if constexpr (!kIsFloats)
      if (in_pairs) return (const float*)widened(rows, count, room.halves);
    return widened(rows, count, room.floats);
  }

  // Convert the values in order to floats, which `mix` reads.
  void widen_values() { wide_values = widened(values, rows_in_order, value_room_); }

  // Scores of the tail, in the order of storage, become those of the tile's positions for the queries that see them.
  void place_tail(int v, const Scores& stored, const Scores& scores) const {
    for_tail(v, [&](int position, int lane, int row) { scores.at(position, lane) = stored.at(row, lane); });
  }

  void cap(float* scores, int count) const {
    if (attention_->sight.softcap > 0)
      for (int at = 0; at < count; at += kLanes) store(scores + at, capped(load(scores + at)));
  }

  // Weights times the scale of int8 values.
  static Lanes scaled(Lanes weights, float scale, bool rounds) {
    return rounds ? as_bfloat16(weights * scale) : weights * scale;
  }

  // Call `add(sides)` for each half of the tile from `half` on: values of even and of odd positions, with the weights
  // of a vector's queries. Weights of int8 values that are stored in order are `scaled` before.
  template <class Add>
  void mix(int v, const Scores& weights, int half, bool rounds, Add add) {
    if (has_tail) spread_weights(v, weights, rounds);
    for (; half * kSummed < kTile && tile + half * kSummed < last_end_; ++half) {
      for (int side = 0; side < 2; ++side) {
        std::vector<Weighted>& own = sides_[side];
        const int from = half * kSummed + side, to = std::min((half + 1) * kSummed, rows_in_order);
        own.resize(std::max(to - from + 1, 0) / 2);
        for (int at = 0; at < int(own.size()); ++at) {
          const int position = from + 2 * at;
          own[at] = {wide_values + size_t(position) * width, &weights.at(position, 0), weights.by_query};
        }
        for (int row = 0; has_tail && row < tail_rows; ++row)
          if (const int at = (half * 2 + side) * tail_rows + row; is_seen_[at])
            own.push_back({wide_tail_values_ + size_t(row) * width, &tail_weights_[size_t(at) * kLanes], 1});
      }
      add(sides_);
    }
  }

  // Add the sums over a span to those over the spans before it; `add_values(v, before, after, from, to)` adds those of
  // values.
  template <class AddValues>
  void add(const float* later, float* sums, AddValues add_values) const {
    for (int v = 0; v < vectors; ++v) {
      const Sums to = sums_at(sums, v, width), from = sums_at((float*)later, v, width);
      const Lanes most = larger(load(to.most), load(from.most));
      const Lanes before = power_of_two(load(to.most) - most), after = power_of_two(load(from.most) - most);
      store(to.most, most), store(to.total, fma(load(from.total), after, load(to.total) * before));
      add_values(v, before, after, from.values, to.values);
    }
  }

  // What all spans sum to becomes the rows' results; sums of values lie so far apart.
  void close(const float* sums, int by_query, int by_number) const {
    for (int v = 0; v < vectors; ++v) {
      const Sums own = sums_at((float*)sums, v, width);
      const Lanes total = load(own.total), share = total > 0 ? 1.0f / total : Lanes{};  // 0 of nothing
      for (int lane = 0; lane < lanes_of(v); ++lane) {
        const int query = v * kLanes + lane;
        const size_t row = first_row_ + query / group_;
        float* to = attention_->out + row * attention_->out_stride + first_number_ + query % group_ * width;
        const float* from = own.values + lane * by_query;
        for (int d = 0; d < width; ++d) to[d] = from[d * by_number] * share[lane];
      }
    }
  }

 private:
  // What each row sees, and within which bounds all of them do.
  void look(const Part& part, int first, int rows) {
    if (int(seen_.size()) < rows) seen_.resize(rows);
    low.assign(vectors * kLanes, 0), end.assign(vectors * kLanes, 0);
    first_low_ = first_end_ = straight_ = kEverywhere, last_low_ = last_end_ = 0;
    for (int row = 0; row < rows; ++row) {
      Seen& seen = seen_[row];
      seen.look(part, view_, first + row, attention_->sight);
      first_low_ = std::min(first_low_, seen.low), last_low_ = std::max(last_low_, seen.low);
      first_end_ = std::min(first_end_, seen.end), last_end_ = std::max(last_end_, seen.end);
      straight_ = std::min(straight_, seen.straight);
      std::fill_n(&low[row * group_], group_, seen.low), std::fill_n(&end[row * group_], group_, seen.end);
    }
    tail_rows = straight_ == kEverywhere ? 0 : view_.count + part.scratch + part.count - straight_;
  }

  // The rows of a tile's positions one after another.
  const Number* joined(const Number* stored, std::vector<Number>& room) const {
    const int first = view_.row(tile);
    const bool lie_together = !rows_in_order || view_.row(tile + rows_in_order - 1) - first == rows_in_order - 1;
    if (lie_together) return stored + size_t(first) * width;
    room.resize(size_t(kTile) * width);
    for (int at = 0; at < rows_in_order; ++at)
      std::memcpy(&room[size_t(at) * width], stored + size_t(view_.row(tile + at)) * width, sizeof(Number) * width);
    return room.data();
  }

  void open_tile(int at) {
    tile = at;
    rows_in_order = std::max(std::min({kTile, straight_ - tile, last_end_ - tile}), 0);
    has_tail = tile + kTile > straight_;
    keys = joined(slot_keys_, viewed_keys_), values = joined(slot_values_, viewed_values_);
    if (has_tail) {
      const size_t row = view_.row(straight_);
      tail_keys = slot_keys_ + row * width;
      if (kIsBytes) tail_key_scales = slot_key_scales_ + row;
      wide_tail_values_ = widened(slot_values_ + row * width, tail_rows, tail_value_room_);
    }
    for (int each = 0; kIsBytes && each < kTile; ++each) {
      const int row = view_.row(tile + each);
      const bool in_order = each < rows_in_order;
      key_scales[each] = in_order ? slot_key_scales_[row] : 1, value_scales[each] = in_order ? slot_value_scales_[row] : 1;
    }
  }

  // Do `work(position in the tile, lane, row of the tail)` for the positions that are not stored in order, for every query
  // of a vector that sees them.
  template <class Work>
  void for_tail(int v, Work work) const {
    const int from = std::max(straight_, tile);
    for (int lane = 0; lane < lanes_of(v); ++lane) {
      const Seen& seen = seen_[(v * kLanes + lane) / group_];
      for (int position = from; position < std::min(seen.end, tile + kTile); ++position)
        work(position - tile, lane, seen.place(position) - straight_);
    }
  }

  // The weights of the tail by half, side and row.
  void spread_weights(int v, const Scores& weights, bool rounds) {
    is_seen_.assign(4 * tail_rows, 0), tail_weights_.assign(size_t(4 * tail_rows) * kLanes, 0);
    for_tail(v, [&](int position, int lane, int row) {
      const int at = (position / kSummed * 2 + position % 2) * tail_rows + row;
      float weight = weights.at(position, lane);
      if (kIsBytes) weight = scaled(all(weight), slot_value_scales_[view_.row(straight_ + row)], rounds)[0];
      is_seen_[at] = 1, tail_weights_[size_t(at) * kLanes + lane] = weight;
    });
  }

  Lanes capped(Lanes score) const {  // the cap applies to scaled scores; the result is unscaled again
    const float cap = attention_->sight.softcap, scaling = attention_->sight.scaling;
    const Lanes x = smaller(score * (2 * scaling / cap), all(80.0f));
    return (1.0f - 2.0f / (1.0f + exponential(x))) * (cap / scaling);
  }

  const Attention* attention_ = nullptr;
  View view_;
  int group_ = 0;                            // queries of a row
  size_t first_row_ = 0, first_number_ = 0;  // of queries and results
  const Number *slot_keys_ = nullptr, *slot_values_ = nullptr;
  const float *slot_key_scales_ = nullptr, *slot_value_scales_ = nullptr;  // of int8, by row
  std::vector<Number> viewed_keys_, viewed_values_;  // of a tile, copied together
  std::vector<Seen> seen_;                           // by row
  int first_low_ = 0, last_low_ = 0, first_end_ = 0, last_end_ = 0;
  int straight_ = 0;  // first position that is not stored in order
  const float* wide_tail_values_ = nullptr;
  std::vector<float> value_room_, tail_value_room_, tail_weights_;
  std::vector<uint8_t> is_seen_;
  std::vector<Weighted> sides_[2];  // of positions even and odd
};
