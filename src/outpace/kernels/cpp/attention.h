// Attention of rows over their slot: committed rows in their order, then the rows of the pass that each sees.
// Python reference: outpace.models.attention.attend_segments.
//
// A row's sums run over the keys it sees in the order of logical positions, wherever they are stored: a token has the
// same bits in a tree, in a chain and alone.
#pragma once
#include <vector>

#include "pool.h"
#include "rows.h"

// Keys and values [layers, slots, kv_heads, capacity, head_dim], strides in numbers.
struct Store {
  void* keys;
  void* values;
  int64_t layer_stride, slot_stride, head_stride;
  int32_t kind, head_dim;
};

// One request's rows in a pass.
struct Part {
  const uint8_t* visible;    // [count, scratch + count], null if a row sees all of them
  const int64_t* positions;  // [scratch + count], logical
  int32_t slot, start, count, committed, scratch;
};

struct Sight {
  int32_t window;  // how far back a row sees, in logical positions; 0 without a limit
  float softcap;   // 0 for none
  float scaling;
  int32_t causal;  // whether a row of the pass sees only earlier ones of it, whatever its part says
};

template <class Number>
static inline Lanes load_number(const Number* from);
template <>
inline Lanes load_number(const float* from) { return load(from); }
template <>
inline Lanes load_number(const uint16_t* from) { return load_bfloat16(from); }

static inline float as_float(float number) { return number; }

// Its sum runs over vectors of the row in their order, then over lanes.
template <class Number>
static inline float dot(const float* query, const Number* key, int width) {
  Lanes total = {};
  int at = 0;
  for (; at + kLanes <= width; at += kLanes) total = fma(load(query + at), load_number(key + at), total);
  float found = sum(total);
  for (; at < width; ++at) found += query[at] * as_float(key[at]);
  return found;
}

// What a row sees of its slot, in the order of logical positions: committed rows from `first` on, then rows behind them.
struct Seen {
  int first, committed;
  std::vector<int32_t> tail;

  int count() const { return committed - first + int(tail.size()); }

  void look(const Part& part, int row, const Sight& sight) {
    const int width = sight.causal ? part.scratch + row + 1 : part.scratch + part.count;
    const int stride = part.scratch + part.count;
    const int64_t reach = sight.window ? part.positions[part.scratch + row] - sight.window : -1;  // what is seen lies behind it
    committed = part.committed;
    first = int(std::min<int64_t>(std::max<int64_t>(reach + 1, 0), committed));
    tail.clear();
    for (int other = 0; other < width; ++other)
      if ((!part.visible || part.visible[size_t(row) * stride + other]) && part.positions[other] > reach)
        tail.push_back(committed + other);
  }
};

constexpr int kRowsTogether = 4;                         // of a part, which read the same committed rows
constexpr int kVectorsAtOnce = 4;                        // of a value
constexpr int kQueriesAtOnce = kLanes == 16 ? 4 : 2;     // as many sums as there are registers for

// Rows of one part and key head, and the queries of all their heads.
struct Block {
  Seen seen[kRowsTogether];
  std::vector<const float*> queries;  // [rows * group]
  std::vector<float*> outs;
  std::vector<float> scores;          // [rows * group, stride]
  int stride, group;

  const Seen& of(int query) const { return seen[query / group]; }
};

// Four dot products with one key of V vectors.
template <int V, class Number>
static inline void dots(const float* const* queries, const Number* key, float scaling, float* out, int stride) {
  Lanes sums[4] = {};
  for (int v = 0; v < V; ++v) {
    const Lanes numbers = load_number(key + v * kLanes);
    for (int q = 0; q < 4; ++q) sums[q] = fma(load(queries[q] + v * kLanes), numbers, sums[q]);
  }
  float each[4];
  sum_four(sums, each);
  for (int q = 0; q < 4; ++q) out[q * stride] = each[q] * scaling;
}

// Scores of four queries and all rows that they see; beyond V vectors a width is summed number by number.
template <int V, class Number>
static inline void score_four(const Number* keys, int width, float scaling, int q, Block& block) {
  const int first = block.seen[0].first, committed = block.seen[0].committed, stride = block.stride;
  const int count = std::min(4, int(block.queries.size()) - q);
  const float* queries[4];
  for (int each = 0; each < 4; ++each) queries[each] = block.queries[q + std::min(each, count - 1)];
  float* scores = &block.scores[size_t(q) * stride];
  const auto at = [&](int row, float* out, int step) {
    const Number* key = keys + size_t(row) * width;
    if constexpr (V > 0) return dots<V>(queries, key, scaling, out, step);
    for (int each = 0; each < 4; ++each) out[each * step] = dot(queries[each], key, width) * scaling;
  };
  float four[4];
  for (int row = first; row < committed; ++row) {
    at(row, four, 1);
    for (int each = 0; each < count; ++each) scores[each * stride + row - first] = four[each];
  }
  for (int each = 0; each < count; ++each) {
    float* behind = scores + each * stride + committed - first;
    for (const int32_t row : block.of(q + each).tail) {
      at(row, four, 1);
      *behind++ = four[each];
    }
  }
}

template <class Number>
static void score(const Number* keys, int width, const Sight& sight, Block& block) {
  for (int q = 0; q < int(block.queries.size()); q += 4) {
    if (width == 4 * kLanes) score_four<4>(keys, width, sight.scaling, q, block);
    else if (width == 8 * kLanes) score_four<8>(keys, width, sight.scaling, q, block);
    else if (width == 16 * kLanes) score_four<16>(keys, width, sight.scaling, q, block);
    else score_four<0>(keys, width, sight.scaling, q, block);
  }
}

// Scores made weights, behind which a whole vector of zeros ends.
static inline void weigh(float* scores, int count, const Sight& sight) {
  const int whole = (count + kLanes - 1) / kLanes * kLanes;
  for (int n = count; n < whole; ++n) scores[n] = -INFINITY;
  if (sight.softcap > 0)
    for (int n = 0; n < count; ++n) scores[n] = sight.softcap * std::tanh(scores[n] / sight.softcap);
  Lanes most = all(-INFINITY);
  for (int n = 0; n < whole; n += kLanes) most = larger(most, load(scores + n));
  const float top = largest(most);
  Lanes total = {};
  for (int n = 0; n < whole; n += kLanes) {
    store(scores + n, exponential(load(scores + n) - top));
    for (int rest = std::max(count, n); rest < n + kLanes; ++rest) scores[rest] = 0;
    total += load(scores + n);
  }
  const Lanes share = all(1.0f / sum(total));
  for (int n = 0; n < whole; n += kLanes) store(scores + n, load(scores + n) * share);
}

// Some vectors of the weighted sums of values, for Q queries from `q` on.
template <int Q, int V, class Number>
static inline void mix(const Number* values, int width, int at, int q, Block& block) {
  const int first = block.seen[0].first, committed = block.seen[0].committed, stride = block.stride;
  const float* weights = &block.scores[size_t(q) * stride];
  Lanes sums[Q][V] = {};
  for (int row = first; row < committed; ++row) {
    const Number* value = values + size_t(row) * width + at;
    for (int v = 0; v < V; ++v) {
      const Lanes numbers = load_number(value + v * kLanes);
      for (int each = 0; each < Q; ++each)
        sums[each][v] = fma(all(weights[each * stride + row - first]), numbers, sums[each][v]);
    }
  }
  for (int each = 0; each < Q; ++each) {
    int n = each * stride + committed - first;
    for (const int32_t row : block.of(q + each).tail) {
      for (int v = 0; v < V; ++v)
        sums[each][v] = fma(all(weights[n]), load_number(values + size_t(row) * width + at + v * kLanes), sums[each][v]);
      ++n;
    }
    for (int v = 0; v < V; ++v) store(block.outs[q + each] + at + v * kLanes, sums[each][v]);
  }
}

template <int V, class Number>
static inline void mix_all(const Number* values, int width, int at, Block& block) {
  int q = 0;
  for (; q + kQueriesAtOnce <= int(block.queries.size()); q += kQueriesAtOnce)
    mix<kQueriesAtOnce, V>(values, width, at, q, block);
  for (; q < int(block.queries.size()); ++q) mix<1, V>(values, width, at, q, block);
}

template <class Number>
static void attend(const Number* keys, const Number* values, int width, const Sight& sight, Block& block) {
  score(keys, width, sight, block);
  for (int q = 0; q < int(block.queries.size()); ++q)
    weigh(&block.scores[size_t(q) * block.stride], block.of(q).count(), sight);
  int at = 0;
  for (; at + kVectorsAtOnce * kLanes <= width; at += kVectorsAtOnce * kLanes)
    mix_all<kVectorsAtOnce>(values, width, at, block);
  for (; at + kLanes <= width; at += kLanes) mix_all<1>(values, width, at, block);
  for (; at < width; ++at)
    for (int q = 0; q < int(block.queries.size()); ++q) {
      const Seen& seen = block.of(q);
      const float* weights = &block.scores[size_t(q) * block.stride];
      float total = 0;
      for (int row = seen.first; row < seen.committed; ++row)
        total += *weights++ * as_float(values[size_t(row) * width + at]);
      for (const int32_t row : seen.tail) total += *weights++ * as_float(values[size_t(row) * width + at]);
      block.outs[q][at] = total;
    }
}

static inline size_t place(const Store& kv, int layer, int slot, int head, int row) {
  return layer * kv.layer_stride + slot * kv.slot_stride + head * kv.head_stride + size_t(row) * kv.head_dim;
}

// File one head's key and value of a row.
static inline void file(const Store& kv, size_t at, const float* key, const float* value) {
  if (kv.kind == kFloat32) {
    std::memcpy((float*)kv.keys + at, key, sizeof(float) * kv.head_dim);
    std::memcpy((float*)kv.values + at, value, sizeof(float) * kv.head_dim);
    return;
  }
  for (int d = 0; d < kv.head_dim; ++d) {
    ((uint16_t*)kv.keys)[at + d] = to_bfloat16(key[d]);
    ((uint16_t*)kv.values)[at + d] = to_bfloat16(value[d]);
  }
}

// Rows that are attended together: those of one part that start at the same row of their slot.
static inline int rows_together(const Sight& sight) { return sight.window ? 1 : kRowsTogether; }

// Attention of `rows` rows of a part from `first` on, all heads of one key head; queries and results [.., heads, head_dim]
// of packed rows lie `query_stride` and `out_stride` numbers apart.
static inline void attend_rows(const Store& kv, int layer, int kv_head, int group, const Part& part, int first, int rows,
                               const Sight& sight, const float* query, int query_stride, float* out, int out_stride) {
  static thread_local Block block;
  block.group = group;
  block.queries.clear(), block.outs.clear();
  int most = 0;
  for (int row = 0; row < rows; ++row) {
    block.seen[row].look(part, first + row, sight);
    most = std::max(most, block.seen[row].count());
    const size_t packed = part.start + first + row;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      block.queries.push_back(query + packed * query_stride + head * kv.head_dim);
      block.outs.push_back(out + packed * out_stride + head * kv.head_dim);
    }
  }
  block.stride = (most + kLanes - 1) / kLanes * kLanes;
  if (block.scores.size() < block.queries.size() * block.stride) block.scores.resize(2 * block.queries.size() * block.stride);
  const size_t at = place(kv, layer, part.slot, kv_head, 0);
  if (kv.kind == kFloat32)
    attend((const float*)kv.keys + at, (const float*)kv.values + at, kv.head_dim, sight, block);
  else
    attend((const uint16_t*)kv.keys + at, (const uint16_t*)kv.values + at, kv.head_dim, sight, block);
}

// Attention of all parts of a pass, shared by a team.
static inline void attend_parts(Team& team, const Store& kv, const Part* parts, int part_count, int layer, int heads,
                         int kv_heads, const Sight& sight, const float* query, int query_stride, float* out,
                         int out_stride) {
  const int together = rows_together(sight), group = heads / kv_heads;
  int pieces = 0;
  for (int part = 0; part < part_count; ++part) pieces += (parts[part].count + together - 1) / together;
  team.share(pieces * kv_heads, [&](int task) {
    int piece = task / kv_heads;
    const Part* part = parts;
    for (int own; piece >= (own = (part->count + together - 1) / together); ++part) piece -= own;
    const int first = piece * together, rows = std::min(together, part->count - first);
    attend_rows(kv, layer, task % kv_heads, group, *part, first, rows, sight, query, query_stride, out, out_stride);
  });
}
