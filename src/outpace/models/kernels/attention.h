// Attention of one row and head over its slot: committed rows in their order, then what it sees of the pass's own.
//
// A row's sums run over the keys it sees in the order of their logical positions, wherever they are stored and whatever
// lies between: a token has the same bits in a tree, in a chain and alone.
#pragma once
#include <vector>

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

  void look(const Part& part, int row, int window) {
    const int width = part.scratch + part.count;
    const int64_t reach = window ? part.positions[part.scratch + row] - window : -1;  // what is seen lies behind it
    committed = part.committed;
    first = int(std::min<int64_t>(std::max<int64_t>(reach + 1, 0), committed));
    tail.clear();
    for (int other = 0; other < width; ++other)
      if ((!part.visible || part.visible[size_t(row) * width + other]) && part.positions[other] > reach)
        tail.push_back(committed + other);
  }

  // `work(n, row)` for the n-th row seen.
  template <class Work>
  void each(Work work) const {
    int n = 0;
    for (int row = first; row < committed; ++row) work(n++, row);
    for (const int32_t row : tail) work(n++, row);
  }
};

constexpr int kVectorsAtOnce = 4;

template <class Number>
static void attend(const Number* keys, const Number* values, const float* query, int width, const Seen& seen,
                   const Sight& sight, std::vector<float>& scores, float* out) {
  const int count = seen.count(), whole = (count + kLanes - 1) / kLanes * kLanes;
  if (int(scores.size()) < whole) scores.resize(2 * whole);
  float* weights = scores.data();
  seen.each([&](int n, int row) { weights[n] = dot(query, keys + size_t(row) * width, width) * sight.scaling; });
  for (int n = count; n < whole; ++n) weights[n] = -INFINITY;
  if (sight.softcap > 0)
    for (int n = 0; n < count; ++n) weights[n] = sight.softcap * std::tanh(weights[n] / sight.softcap);
  Lanes most = all(-INFINITY);
  for (int n = 0; n < whole; n += kLanes) most = larger(most, load(weights + n));
  const float top = largest(most);
  Lanes total = {};
  for (int n = 0; n < whole; n += kLanes) {
    store(weights + n, exponential(load(weights + n) - top));
    for (int rest = std::max(count, n); rest < n + kLanes; ++rest) weights[rest] = 0;
    total += load(weights + n);
  }
  const float share = 1.0f / sum(total);
  int at = 0;
  for (; at + kVectorsAtOnce * kLanes <= width; at += kVectorsAtOnce * kLanes) {
    Lanes sums[kVectorsAtOnce] = {};
    seen.each([&](int n, int row) {
      const Number* value = values + size_t(row) * width + at;
      for (int v = 0; v < kVectorsAtOnce; ++v) sums[v] = fma(all(weights[n]), load_number(value + v * kLanes), sums[v]);
    });
    for (int v = 0; v < kVectorsAtOnce; ++v) store(out + at + v * kLanes, sums[v] * share);
  }
  for (; at + kLanes <= width; at += kLanes) {
    Lanes sums = {};
    seen.each([&](int n, int row) {
      sums = fma(all(weights[n]), load_number(values + size_t(row) * width + at), sums);
    });
    store(out + at, sums * share);
  }
  for (; at < width; ++at) {
    float sums = 0;
    seen.each([&](int n, int row) { sums += weights[n] * as_float(values[size_t(row) * width + at]); });
    out[at] = sums * share;
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

// Attention of row `row` of a part and one head: [head_dim].
static inline void attend_row(const Store& kv, int layer, int kv_head, const Part& part, int row, const Sight& sight,
                              const float* query, float* out) {
  static thread_local Seen seen;
  static thread_local std::vector<float> scores;
  seen.look(part, row, sight.window);
  const size_t at = place(kv, layer, part.slot, kv_head, 0);
  if (kv.kind == kFloat32)
    attend((const float*)kv.keys + at, (const float*)kv.values + at, query, kv.head_dim, seen, sight, scores, out);
  else
    attend((const uint16_t*)kv.keys + at, (const uint16_t*)kv.values + at, query, kv.head_dim, seen, sight, scores, out);
}
