// Attention of rows over their slot: committed rows in their order, then the rows of the pass that each sees.
// Python reference: outpace.models.attention.attend_segments.
//
// The rows of a request and the query heads that share a key head are computed together, with a query to each lane of a
// vector (tiles.h) or a key (by_key.h), whichever is faster; both have the same bits. Keys and values are read once for
// all of them, in tiles of positions; the largest score and the sums go from tile to tile, and from span to span. Where
// tiles, spans and the halves of a tile end depends on logical positions alone: a token has the same bits in a tree, in
// a chain and alone, on any number of threads. Through a view, positions are those of the rows that it names: a tile of
// them is copied together, unless they lie together.
#pragma once
#include <memory>
#include <type_traits>

#include "by_key.h"
#include "pool.h"
#include "slots.h"
#include "tiles.h"

// Sums over a span of positions by vector of queries: values [head_dim][kLanes] (by_key.h: [kLanes][head_dim]), then the
// largest score and the weights.
struct Sums {
  float* values;
  float *most, *total;  // [kLanes]
};

static inline Sums sums_at(float* base, int vector, int width) {
  float* own = base + size_t(vector) * (width + 2) * kLanes;
  return {own, own + width * kLanes, own + (width + 1) * kLanes};
}

// Scores that no row has: below all that are found, and what hidden keys are given, whose weight is then 0.
constexpr float kLowest = -1e20f, kHidden = -3e38f;
constexpr int kSpan = 512;         // positions of a partial sum
constexpr int kMostQueries = 128;  // of a task, whose sums are to stay near its core

// Some rows of one part and key head, with the queries of all their heads, and room for what is computed on the way.
template <class Number>
class Block {
 public:
  void open(const Store& kv, int layer, int kv_head, int group, const Part& part, int first, int rows, const Sight& sight,
            const float* query, int query_stride) {
    const size_t at = ::place(kv, layer, part.slot, kv_head, 0);
    keys_ = (const Number*)kv.keys + at, values_ = (const Number*)kv.values + at;
    if (kIsBytes) key_scales_ = kv.key_scales + at / kv.head_dim, value_scales_ = kv.value_scales + at / kv.head_dim;
    width_ = kv.head_dim, group_ = group, queries_ = rows * group;
    sight_ = &sight, view_ = View(part, layer, kv_head);
    vectors = (queries_ + kLanes - 1) / kLanes;
    amx_ = !kIsFloats && width_ % 32 == 0 && has_amx();
    by_key_ = !amx_ && queries_ <= kMostByKey && width_ % kLanes == 0;
    pairs_ = !kIsFloats && kMultipliesPairs && (amx_ || by_key_ || (kMostByKey == 0 && width_ % 2 == 0));
    words_ = pairs_ ? width_ / 2 : width_;
    look(part, first, rows);
    if (query) take_queries(query + size_t(part.start + first) * query_stride + size_t(kv_head) * group * width_, query_stride);
  }

  int first_span() const { return first_low_ / kSpan; }
  int last_span() const { return std::max(first_span(), (last_end_ - 1) / kSpan); }
  int numbers() const { return vectors * (width_ + 2) * kLanes; }  // of sums

  // Sums over one span.
  void attend(int span, float* sums) {
    const Tiles shapes(amx_);
    for (int v = 0; v < vectors; ++v) {
      const Sums own = sums_at(sums, v, width_);
      std::memset(own.values, 0, sizeof(float) * width_ * kLanes);
      store(own.most, all(kLowest)), store(own.total, Lanes{});
    }
    const int from = std::max(span * kSpan, first_low_ / kTile * kTile), to = std::min((span + 1) * kSpan, last_end_);
    for (int tile = from; tile < to; tile += kTile) {
      open_tile(tile);
      if (by_key_) {
        for (int v = 0; v < vectors; ++v) take_by_key(v, sums);
        continue;
      }
      int v = 0;
      if constexpr (kVectorsAtOnce > 1)
        if (!ends_here_ && width_ % kSharedAtOnce == 0) {
          for (; v + kVectorsAtOnce <= vectors; v += kVectorsAtOnce) take<kVectorsAtOnce>(v, sums);
          if (v + 2 <= vectors) take<2>(v, sums), v += 2;
        }
      for (; v < vectors; ++v) take<1>(v, sums);
    }
  }

  // Add the sums over a span to those over the spans before it.
  void add(const float* later, float* sums) const {
    for (int v = 0; v < vectors; ++v) {
      const Sums to = sums_at(sums, v, width_), from = sums_at((float*)later, v, width_);
      const Lanes most = larger(load(to.most), load(from.most));
      const Lanes before = power_of_two(load(to.most) - most), after = power_of_two(load(from.most) - most);
      store(to.most, most);
      if (by_key_)
        for (int lane = 0; lane < lanes_of(v); ++lane)
          for (int at = lane * width_; at < (lane + 1) * width_; at += kLanes)
            store(to.values + at, fma(load(from.values + at), all(after[lane]), load(to.values + at) * before[lane]));
      else
        for (int at = 0; at < width_ * kLanes; at += kLanes)
          store(to.values + at, fma(load(from.values + at), after, load(to.values + at) * before));
      store(to.total, fma(load(from.total), after, load(to.total) * before));
    }
  }

  // What all spans sum to becomes the rows' results.
  void close(const float* sums, float* out, int stride) const {
    for (int v = 0; v < vectors; ++v) {
      const Sums own = sums_at((float*)sums, v, width_);
      const Lanes total = load(own.total), share = total > 0 ? 1.0f / total : Lanes{};  // 0 of nothing
      for (int lane = 0; lane < kLanes && v * kLanes + lane < queries_; ++lane) {
        const int query = v * kLanes + lane;
        float* to = out + size_t(query / group_) * stride + query % group_ * width_;
        const float* from = own.values + (by_key_ ? lane * width_ : lane);
        const int step = by_key_ ? 1 : kLanes;
        for (int d = 0; d < width_; ++d) to[d] = from[d * step] * share[lane];
      }
    }
  }

  int vectors = 0;

 private:
  static constexpr bool kIsFloats = std::is_same<Number, float>::value, kIsBytes = std::is_same<Number, int8_t>::value;

  // Rows that are stored otherwise, as products read them.
  struct Room {
    std::vector<float> floats;
    std::vector<uint16_t> halves;
  };

  // Add a tile to the sums of V vectors of queries.
  template <int V>
  void take(int v, float* sums) {
    if constexpr (V > 1) score_together<V>(v);
    else score(v);
    const bool hides = tile_ < last_low_ || tile_ + kTile > first_end_;
    for (int each = 0; each < V; ++each) {
      const Sums own = sums_at(sums, v + each, width_);
      float* scores = scores_ + each * kTile * kLanes;
      if (amx_) hides ? weigh<true, true>(v + each, scores, own) : weigh<true, false>(v + each, scores, own);
      else hides ? weigh<false, true>(v + each, scores, own) : weigh<false, false>(v + each, scores, own);
    }
    float* values = sums_at(sums, v, width_).values;
    if constexpr (V > 1)
      for (int from = 0; from < together_; from += kSummed)
        mix_shared<V>(wide_values_ + size_t(from) * width_, std::min(kSummed, together_ - from), width_,
                      scores_ + from * kLanes, kTile * kLanes, values);
    else mix(v, values);
  }

  // What each row sees, and within which bounds all of them do.
  void look(const Part& part, int first, int rows) {
    if (int(seen_.size()) < rows) seen_.resize(rows);
    low_.assign(vectors * kLanes, 0), end_.assign(vectors * kLanes, 0);
    first_low_ = first_end_ = straight_ = kEverywhere, last_low_ = last_end_ = 0;
    for (int row = 0; row < rows; ++row) {
      Seen& seen = seen_[row];
      seen.look(part, view_, first + row, *sight_);
      first_low_ = std::min(first_low_, seen.low), last_low_ = std::max(last_low_, seen.low);
      first_end_ = std::min(first_end_, seen.end), last_end_ = std::max(last_end_, seen.end);
      straight_ = std::min(straight_, seen.straight);
      std::fill_n(&low_[row * group_], group_, seen.low), std::fill_n(&end_[row * group_], group_, seen.end);
    }
    tail_ = straight_ == kEverywhere ? 0 : view_.count + part.scratch + part.count - straight_;
  }

  void take_queries(const float* query, int stride) {
    query_.assign(size_t(vectors) * words_ * kLanes, 0);
    const int step = by_key_ ? 1 : kLanes;
    for (int row = 0, each = 0; each < queries_; ++row)
      for (int head = 0; head < group_; ++head, ++each) {
        const float* from = query + size_t(row) * stride + head * width_;
        float* to = &query_[size_t(each / kLanes) * words_ * kLanes] + each % kLanes * (by_key_ ? words_ : 1);
        if (pairs_) take_pairs(from, width_, to, step);
        else
          for (int d = 0; d < width_; ++d) to[d * step] = from[d];
      }
  }

  // Rows as floats or in bfloat16, widened in `room` where they are stored otherwise. Products may read 15 rows more.
  template <class Wide>
  const Wide* widened(const Number* rows, int count, std::vector<Wide>& room) {
    if constexpr (std::is_same<Number, Wide>::value) {
      return rows;
    } else {
      const size_t numbers = size_t(count) * width_;
      room.resize(std::max(room.size(), numbers + 15 * width_));
      Wide* to = room.data();
      for (size_t at = 0; at < numbers; ++at) {
        if constexpr (std::is_same<Wide, float>::value) to[at] = as_float(rows[at]);
        else to[at] = exact_bfloat16(rows[at]);
      }
      return to;
    }
  }

  // Keys as their products read them.
  const void* as_keys(const Number* rows, int count, Room& room) {
    if constexpr (!kIsFloats)
      if (pairs_) return widened(rows, count, room.halves);
    return widened(rows, count, room.floats);
  }

  // The rows of a tile's positions one after another.
  const Number* joined(const Number* stored, std::vector<Number>& room) {
    const int first = view_.row(tile_);
    if (!together_ || view_.row(tile_ + together_ - 1) - first == together_ - 1) return stored + size_t(first) * width_;
    room.resize(size_t(kTile) * width_);
    for (int at = 0; at < together_; ++at)
      std::memcpy(&room[size_t(at) * width_], stored + size_t(view_.row(tile_ + at)) * width_, sizeof(Number) * width_);
    return room.data();
  }

  // Read a tile's keys and values as the products need them.
  void open_tile(int tile) {
    tile_ = tile;
    together_ = std::min({kTile, straight_ - tile, last_end_ - tile});  // positions stored in order, for all rows
    together_ = std::max(together_, 0);
    ends_here_ = tile + kTile > straight_;
    const Number *keys = joined(keys_, viewed_keys_), *values = joined(values_, viewed_values_);
    const size_t tail_at = ends_here_ ? size_t(view_.row(straight_)) * width_ : 0;
    tile_keys_ = as_keys(keys, together_, key_room_);
    if (ends_here_) tail_keys_ = as_keys(keys_ + tail_at, tail_, tail_key_room_);
    if (by_key_) turn(tile_keys_, together_, turned_keys_);
    if (by_key_ && ends_here_) turn(tail_keys_, tail_, turned_tail_);
    turned_ = !amx_ ? 0 : ends_here_ ? together_ / kSummed : (together_ + kSummed - 1) / kSummed;
    if constexpr (!kIsFloats)
      if (turned_ > 0) half_values_ = widened(values, together_, value_room_.halves);
    if (turned_ * kSummed < together_) wide_values_ = widened(values, together_, value_room_.floats);
    if (ends_here_) wide_tail_values_ = widened(values_ + tail_at, tail_, tail_value_room_);
    for (int at = 0; kIsBytes && at < kTile; ++at) {
      const int row = view_.row(tile + at);
      tile_key_scales_[at] = at < together_ ? key_scales_[row] : 1, tile_scales_[at] = at < together_ ? value_scales_[row] : 1;
    }
  }

  // Add a tile to the sums of a vector's queries: scores [query][kTile], sums of values [query][width].
  void take_by_key(int v, float* sums) {
    const Sums own = sums_at(sums, v, width_);
    score_by_key(turned_keys_.data(), tile_key_scales_, together_, v, scores_, kTile);
    if (ends_here_) {
      const int stride = (tail_ + kTurned - 1) / kTurned * kTurned;
      tail_scores_.resize(size_t(kLanes) * stride);
      score_by_key(turned_tail_.data(), key_scales_ + view_.row(straight_), tail_, v, tail_scores_.data(), stride);
      for_tail(v, [&](int position, int lane, int row) {
        scores_[lane * kTile + position - tile_] = tail_scores_[lane * stride + row - straight_];
      });
    }
    if (sight_->softcap > 0)
      for (int at = 0; at < lanes_of(v) * kTile; at += kLanes) store(scores_ + at, capped(load(scores_ + at)));
    weigh_by_key(v, own);
    mix_by_key(v, own.values);
  }

  int lanes_of(int v) const { return std::min(kLanes, queries_ - v * kLanes); }

  // Turn keys for products with a key to each lane.
  void turn(const void* keys, int count, std::vector<float>& turned) const {
    const int blocks = (count + kTurned - 1) / kTurned;
    turned.resize(size_t(blocks) * kTurned * words_);
    for (int at = 0; at < count; at += kTurned)
      turn_keys((const float*)keys + size_t(at) * words_, words_, count - at, &turned[size_t(at) * words_]);
  }

  // Scores of turned keys and a vector's queries, rows so many numbers apart.
  void score_by_key(const float* turned, const float* scales, int count, int v, float* out, int stride) {
    const float* query = &query_[size_t(v) * words_ * kLanes];
    for (int at = 0; at < count; at += kTurned, turned += kTurned * words_) {
      if (pairs_) score_queries<true>(turned, words_, query, lanes_of(v), out + at, stride);
      else score_queries<false>(turned, words_, query, lanes_of(v), out + at, stride);
    }
    for (int lane = 0; kIsBytes && lane < lanes_of(v); ++lane)
      for (int at = 0; at < count; ++at) out[lane * stride + at] *= scales[at];
  }

  // As `weigh`, with positions in lanes.
  void weigh_by_key(int v, const Sums& sums) {
    const int queries = lanes_of(v), *low = &low_[v * kLanes], *end = &end_[v * kLanes];
    const bool hides = tile_ < last_low_ || tile_ + kTile > first_end_;
    const Lanes factor = all(sight_->scaling * 1.44269504f);
    const auto seen = [&](int query, int at, Lanes number, float otherwise) {
      if (!hides) return number;
      IntLanes position;
      for (int lane = 0; lane < kLanes; ++lane) position[lane] = tile_ + at + lane;
      return (position >= low[query]) & (position < end[query]) ? number : all(otherwise);
    };
    alignas(64) float best[kLanes];
    store(best, all(kHidden));
    for (int query = 0; query < queries; ++query) {
      Lanes own = all(kHidden);
      for (int at = 0; at < kTile; at += kLanes) own = larger(own, seen(query, at, load(scores_ + query * kTile + at), kHidden));
      best[query] = largest(own);
    }
    const Lanes before = load(sums.most), most = larger(before, load(best) * factor);
    if (std::memcmp(&most, &before, sizeof most)) {
      const Lanes less = power_of_two(before - most);
      store(sums.most, most), store(sums.total, load(sums.total) * less);
      for (int query = 0; query < queries; ++query)
        for (int at = query * width_; at < (query + 1) * width_; at += kLanes)
          store(sums.values + at, load(sums.values + at) * less[query]);
    }
    for (int query = 0; query < queries; ++query) {
      float* own = scores_ + query * kTile;
      for (int at = 0; at < kTile; at += kLanes)
        store(own + at, seen(query, at, power_of_two(fma(load(own + at), factor, all(-most[query]))), 0));
      sums.total[query] += total_of(own);
      for (int at = 0; kIsBytes && at < kTile; at += kLanes) store(own + at, load(own + at) * load(tile_scales_ + at));
    }
  }

  // Add a tile's values, weighted by a vector's queries.
  void mix_by_key(int v, float* out) {
    if (ends_here_) spread_weights(v, 1, kTile);
    for (int half = 0; half * kSummed < kTile && tile_ + half * kSummed < last_end_; ++half) {
      shared_[0].clear(), shared_[1].clear();
      for (int at = half * kSummed; at < std::min((half + 1) * kSummed, together_); ++at)
        shared_[at % 2].push_back({wide_values_ + size_t(at) * width_, scores_ + at, kTile});
      for_seen(half, [&](int side, int row, int at) {
        shared_[side].push_back({wide_tail_values_ + size_t(row) * width_, &tail_weights_[size_t(at) * kLanes], 1});
      });
      mix_queries(shared_, width_, lanes_of(v), out);
    }
  }

  // Do `work` for the rows of a tile that are not stored in order, in half of it, by side.
  template <class Work>
  void for_seen(int half, Work work) const {
    for (int row = 0; ends_here_ && row < tail_; ++row)
      for (int side = 0; side < 2; ++side)
        if (const int at = (half * 2 + side) * tail_ + row; is_seen_[at]) work(side, row, at);
  }

  // Scores of keys; `scales`: of int8.
  void score_rows(const void* keys, const float* scales, int count, int v, float* out) {
    const float* query = &query_[size_t(v) * words_ * kLanes];
#if OUTPACE_AMX
    if (amx_) score_tiles((const uint16_t*)keys, width_, count, (const uint16_t*)query, out);
    else
#endif
    score_vectors<1, kKeysAtOnce>(keys, count, query, out);
    for (int at = 0; kIsBytes && at < count; ++at)
      store(out + at * kLanes, load(out + at * kLanes) * scales[at]);
  }

  template <int V, int K>
  void score_vectors(const void* keys, int count, const float* query, float* out) const {
    constexpr int step = kTile * kLanes;
    if (pairs_) score_keys<NumberPairs, V, K>((const float*)keys, words_, count, query, out, step);
    else score_keys<SingleNumbers, V, K>((const float*)keys, words_, count, query, out, step);
  }

  // Scores of a tile that is stored in order, for V vectors of queries.
  template <int V>
  void score_together(int v) {
    const float* query = &query_[size_t(v) * words_ * kLanes];
    score_vectors<V, kSharedAtOnce>(tile_keys_, together_, query, scores_);
    for (int each = 0; each < V; ++each) {
      float* scores = scores_ + each * kTile * kLanes;
      for (int at = 0; kIsBytes && at < together_; ++at)
        store(scores + at * kLanes, load(scores + at * kLanes) * tile_key_scales_[at]);
      cap(scores);
    }
  }

  const Seen& seen_by(int query) const { return seen_[query / group_]; }

  // Scores of a tile: of what is stored in order for all queries at once, of the rest by the rows that each sees.
  void score(int v) {
    score_rows(tile_keys_, tile_key_scales_, together_, v, scores_);
    if (ends_here_) {
      tail_scores_.resize(size_t(tail_ + 16) * kLanes);
      score_rows(tail_keys_, key_scales_ + view_.row(straight_), tail_, v, tail_scores_.data());
      for_tail(v, [&](int position, int lane, int row) {
        scores_[(position - tile_) * kLanes + lane] = tail_scores_[(row - straight_) * kLanes + lane];
      });
    }
    cap(scores_);
  }

  void cap(float* scores) const {
    if (sight_->softcap > 0)
      for (int at = 0; at < kTile * kLanes; at += kLanes) store(scores + at, capped(load(scores + at)));
  }

  // Do `work` for the positions of a tile that are not stored in order, for every query of a vector that sees them.
  template <class Work>
  void for_tail(int v, Work work) {
    const int from = std::max(straight_, tile_);
    for (int lane = 0; lane < kLanes && v * kLanes + lane < queries_; ++lane) {
      const Seen& seen = seen_by(v * kLanes + lane);
      for (int position = from; position < std::min(seen.end, tile_ + kTile); ++position)
        work(position, lane, seen.place(position));
    }
  }

  Lanes capped(Lanes score) const {  // as if scaled
    const float cap = sight_->softcap;
    const Lanes x = smaller(score * (2 * sight_->scaling / cap), all(80.0f));
    return (1.0f - 2.0f / (1.0f + exponential(x))) * (cap / sight_->scaling);
  }

  // Weights of int8 values, which stand for so many times as much.
  static Lanes scaled(Lanes weights, float scale, bool rounds) {
    return rounds ? as_bfloat16(weights * scale) : weights * scale;
  }

  // Scores become weights, relative to the largest score so far. Kinds: whether they are rounded to bfloat16, for AMX;
  // whether some queries do not see all positions of the tile.
  template <bool Rounds, bool Hides>
  void weigh(int v, float* scores, const Sums& sums) {
    const Lanes factor = all(sight_->scaling * 1.44269504f);
    IntLanes low, end;
    std::memcpy(&low, &low_[v * kLanes], sizeof low), std::memcpy(&end, &end_[v * kLanes], sizeof end);
    const auto seen = [&](int at, Lanes number, float otherwise) {
      if constexpr (!Hides) return number;
      const IntLanes position = IntLanes{} + (tile_ + at);
      return (position >= low) & (position < end) ? number : all(otherwise);
    };
    Lanes best[4] = {all(kHidden), all(kHidden), all(kHidden), all(kHidden)};
    for (int at = 0; at < kTile; at += 4)
      for (int each = 0; each < 4; ++each)
        best[each] = larger(best[each], seen(at + each, load(scores + (at + each) * kLanes), kHidden));
    const Lanes before = load(sums.most);
    const Lanes most = larger(before, larger(larger(best[0], best[1]), larger(best[2], best[3])) * factor);
    if (std::memcmp(&most, &before, sizeof most)) {
      const Lanes less = power_of_two(before - most);
      store(sums.most, most), store(sums.total, load(sums.total) * less);
      const int numbers = width_ * kLanes;
      for (int at = 0; at < numbers; at += kLanes) store(sums.values + at, load(sums.values + at) * less);
    }
    Lanes total[4] = {};
    for (int at = 0; at < kTile; at += 4) {
      Lanes weights[4];
      for (int each = 0; each < 4; ++each) {
        float* own = scores + (at + each) * kLanes;
        const Lanes power = power_of_two<Rounds>(fma(load(own), factor, -most));
        weights[each] = seen(at + each, Rounds ? as_bfloat16(power) : power, 0);
        total[each] += weights[each];
        if constexpr (kIsBytes) weights[each] = scaled(weights[each], tile_scales_[at + each], Rounds);
        store(own, weights[each]);
      }
      for (int each = 0; Rounds && each < 4; each += 2) {
        const BitLanes both = (BitLanes)weights[each] >> 16 | (BitLanes)weights[each + 1];
        std::memcpy(weights_ + (at + each) * kLanes, &both, sizeof both);
      }
    }
    store(sums.total, load(sums.total) + ((total[0] + total[1]) + (total[2] + total[3])));
  }

  // Add a tile's values, weighted.
  void mix(int v, float* out) {
    int half = 0;
#if OUTPACE_AMX
    if (turned_ > 0) {
      if (v == 0) turn();
      mix_tiles(turned_values_.data(), width_, turned_, weights_, out);
      half = turned_;
    }
#endif
    if (ends_here_) spread_weights(v, kLanes, 1);
    for (; half * kSummed < kTile && tile_ + half * kSummed < last_end_; ++half) {
      std::vector<Weighted>* sides = sides_;
      sides[0].clear(), sides[1].clear();
      for (int at = half * kSummed; at < std::min((half + 1) * kSummed, together_); ++at)
        sides[at % 2].push_back({wide_values_ + size_t(at) * width_, scores_ + at * kLanes});
      for_seen(half, [&](int side, int row, int at) {
        sides[side].push_back({wide_tail_values_ + size_t(row) * width_, &tail_weights_[size_t(at) * kLanes]});
      });
      mix_values(sides[0], sides[1], width_, out);
    }
  }

#if OUTPACE_AMX
  void turn() {
    turned_values_.resize(kTile * width_);
    for (int half = 0; half < turned_; ++half) {
      const size_t at = size_t(half) * kSummed * width_;
      turn_values(half_values_ + at, width_, std::min(kSummed, together_ - half * kSummed), &turned_values_[at]);
    }
  }
#endif

  // The weights of positions that are not stored in order, by half, side and row; scores are so many numbers apart, by
  // position and by query.
  void spread_weights(int v, int by_position, int by_query) {
    is_seen_.assign(4 * tail_, 0), tail_weights_.assign(size_t(4 * tail_) * kLanes, 0);
    for_tail(v, [&](int position, int lane, int row) {
      const int at = ((position - tile_) / kSummed * 2 + position % 2) * tail_ + row - straight_;
      float weight = scores_[(position - tile_) * by_position + lane * by_query];
      if (kIsBytes) weight = scaled(all(weight), value_scales_[view_.row(row)], amx_)[0];
      is_seen_[at] = 1, tail_weights_[size_t(at) * kLanes + lane] = weight;
    });
  }

  const Sight* sight_ = nullptr;
  View view_;
  const Number *keys_ = nullptr, *values_ = nullptr;  // of the slot
  const float *key_scales_ = nullptr, *value_scales_ = nullptr;  // of int8, by row
  std::vector<Number> viewed_keys_, viewed_values_;  // of a tile, copied together
  int width_ = 0, words_ = 0, group_ = 0, queries_ = 0;  // words: of a key, as its products read it
  bool amx_ = false, pairs_ = false, by_key_ = false;
  std::vector<Seen> seen_;               // by row
  std::vector<int32_t> low_, end_;       // by lane
  std::vector<float> query_;             // by vector [words][kLanes], or [kLanes][words] by key
  int first_low_ = 0, last_low_ = 0, first_end_ = 0, last_end_ = 0;
  int straight_ = 0, tail_ = 0;          // from where on rows are not all stored in order, and how many are stored there
  // Of a tile: positions that are stored in order for all queries, whether others follow, and halves turned for AMX.
  int tile_ = 0, together_ = 0, turned_ = 0;
  bool ends_here_ = false;
  const void *tile_keys_ = nullptr, *tail_keys_ = nullptr;
  const float *wide_values_ = nullptr, *wide_tail_values_ = nullptr;
  const uint16_t* half_values_ = nullptr;
  Room key_room_, tail_key_room_, value_room_;
  std::vector<float> tail_value_room_, tail_scores_, tail_weights_;
  float tile_key_scales_[kTile] = {}, tile_scales_[kTile] = {};  // of int8 keys and values that are stored in order
  std::vector<uint16_t> turned_values_;  // [halves][width][kSummed]
  std::vector<uint8_t> is_seen_;
  std::vector<Weighted> sides_[2];       // of positions even and odd
  std::vector<Shared> shared_[2];
  std::vector<float> turned_keys_, turned_tail_;
  alignas(64) float scores_[kVectorsAtOnce * kTile * kLanes] = {};
  alignas(64) uint16_t weights_[kTile * kLanes] = {};
};

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

// Tasks of a pass: the rows of a part in pieces, for each key head; and spans, where these are shared out too.
struct Tasks {
  int count = 0, spans = 1, numbers = 0;  // numbers: of the sums of a task

  Tasks(const Part* parts, int part_count, int heads, int kv_heads, int width, int threads) {
    for (int part = 0; part < part_count; ++part) {
      const int rows = rows_together(parts[part].count, heads / kv_heads), queries = rows * heads / kv_heads;
      count += (parts[part].count + rows - 1) / rows * kv_heads;
      const int before = View(parts[part], 0, 0).count + parts[part].scratch;
      spans = std::max(spans, (before + parts[part].count + kSpan - 1) / kSpan);
      numbers = std::max(numbers, (queries + kLanes - 1) / kLanes * kLanes * (width + 2));
    }
    if (count >= 4 * threads) spans = 1;  // enough for all threads to be busy
  }

  size_t room() const { return spans > 1 ? size_t(count) * spans * numbers : 0; }

  static int rows_together(int count, int group) {
    const int pieces = std::max(1, (count * group + kMostQueries - 1) / kMostQueries);
    return (count + pieces - 1) / pieces;
  }
};

template <class Number>
static void attend_typed(Team& team, const Attention& a, float* room) {
  const int group = a.heads / a.kv_heads, width = a.kv.head_dim;
  const Tasks tasks(a.parts, a.part_count, a.heads, a.kv_heads, width, team.size);
  static thread_local const std::unique_ptr<Block<Number>> own(new Block<Number>);
  Block<Number>& block = *own;  // through a pointer: compilers ask for a thread's own variable again and again
  float* out = nullptr;
  const auto open = [&](int task, bool reads) {
    int piece = task / a.kv_heads, rows;
    const Part* part = a.parts;
    for (int own;; ++part, piece -= own) {
      rows = Tasks::rows_together(part->count, group), own = (part->count + rows - 1) / rows;
      if (piece < own) break;
    }
    const int first = piece * rows, head = task % a.kv_heads;
    block.open(a.kv, a.layer, head, group, *part, first, std::min(rows, part->count - first), a.sight,
               reads ? a.query : nullptr, a.query_stride);
    out = a.out + size_t(part->start + first) * a.out_stride + size_t(head) * group * width;
  };
  if (tasks.spans == 1) {
    static thread_local std::vector<float> sums;
    return team.share(tasks.count, [&](int task) {
      open(task, true);
      sums.resize(std::max(sums.size(), size_t(2 * block.numbers())));
      float *all = sums.data(), *later = all + block.numbers();
      block.attend(block.first_span(), all);
      for (int span = block.first_span() + 1; span <= block.last_span(); ++span) {
        block.attend(span, later);
        block.add(later, all);
      }
      block.close(all, out, a.out_stride);
    });
  }
  const auto sums_of = [&](int task, int span) { return room + (size_t(task) * tasks.spans + span) * tasks.numbers; };
  team.share(tasks.count * tasks.spans, [&](int item) {
    const int task = item / tasks.spans, span = item % tasks.spans;
    open(task, true);
    if (span >= block.first_span() && span <= block.last_span()) block.attend(span, sums_of(task, span));
  });
  team.share(tasks.count, [&](int task) {
    open(task, false);
    float* all = sums_of(task, block.first_span());
    for (int span = block.first_span() + 1; span <= block.last_span(); ++span) block.add(sums_of(task, span), all);
    block.close(all, out, a.out_stride);
  });
}

// Attention of all parts of a pass, shared by a team; `room` as large as Tasks says for so many threads or more.
static inline void attend_parts(Team& team, const Attention& a, float* room) {
  if (a.kv.kind == kFloat32) attend_typed<float>(team, a, room);
  else if (a.kv.kind == kInt8) attend_typed<int8_t>(team, a, room);
  else attend_typed<uint16_t>(team, a, room);
}
