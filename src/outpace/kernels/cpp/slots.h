// Slots of keys and values, and what of them a row sees.
// Python reference: outpace.cache.slots (SlotKV, Segment).
#pragma once
#include <algorithm>
#include <vector>

#include "rows.h"

// Keys and values [layers, slots, kv_heads, capacity, head_dim], strides in numbers. Up to 15 rows behind the last one
// that is in use can be read. In int8 every row of a head has a scale, in the same order, and keys are `spread`.
struct Store {
  void* keys;
  void* values;
  float *key_scales, *value_scales;  // null for other kinds
  const float* key_offsets;          // [layers, kv_heads, head_dim], subtracted from keys of int8
  int64_t layer_stride, slot_stride, head_stride;
  int32_t kind, head_dim;
};

// One request's rows in a pass.
struct Part {
  const uint8_t* visible;    // [count, scratch + count], null if a row sees all of them
  const int64_t* positions;  // [scratch + count], logical
  const int32_t* view;       // the committed rows that are seen, ascending, for each layer and key head; null for all
  int32_t slot, start, count, committed, scratch;
  int32_t viewed, view_layer_stride, view_head_stride;  // rows of a view; strides in numbers, 0 where shared
};

// The committed rows that a layer's key head sees. Positions count through them, then through the rows behind.
struct View {
  const int32_t* rows = nullptr;  // null for all committed ones
  int count = 0, beyond = 0;      // rows; how far rows behind the committed ones lie from their positions

  View() = default;
  View(const Part& part, int layer, int head) : count(part.committed) {
    if (!part.view) return;
    rows = part.view + size_t(layer) * part.view_layer_stride + size_t(head) * part.view_head_stride;
    count = part.viewed, beyond = part.committed - part.viewed;
  }

  // The row of the slot that a position stands for.
  int row(int position) const { return rows && position < count ? rows[position] : position + beyond; }

  // The first position whose row is not before one; the number of rows if there is none.
  int from(int64_t row) const {
    if (rows) return int(std::lower_bound(rows, rows + count, row) - rows);
    return int(std::min<int64_t>(std::max<int64_t>(row, 0), count));
  }
};

struct Sight {
  int32_t window;  // how far back a row sees, in logical positions; 0 without a limit
  float softcap;   // 0 for none
  float scaling;
  int32_t causal;  // whether a row of the pass sees only earlier ones of it, whatever its part says
};

static inline size_t place(const Store& kv, int layer, int slot, int head, int row) {
  return layer * kv.layer_stride + slot * kv.slot_stride + head * kv.head_stride + size_t(row) * kv.head_dim;
}

// Rotate queries or keys of some heads where the slots hold int8, which changes no product of the two: some models add
// large biases to a few channels of keys, and one scale for all would leave the others few bits.
static inline void spread(const Store& kv, float* heads, int count) {
  const int block = std::min(kv.head_dim & -kv.head_dim, 512);  // Python reference: outpace.lib.int8.rotation_of
  if (kv.kind == kInt8) hadamard(heads, count * kv.head_dim, block);
}

// Make a layer's keys of a row what int8 slots store: less the offsets, which add the same to all scores of a query.
static inline void shift(const Store& kv, int layer, float* keys, int kv_heads) {
  if (kv.kind != kInt8) return;
  const int numbers = kv_heads * kv.head_dim;
  for (int at = 0; at < numbers; ++at) keys[at] -= kv.key_offsets[size_t(layer) * numbers + at];
  spread(kv, keys, kv_heads);
}

// File one head's key and value of a row.
static inline void file(const Store& kv, size_t at, const float* key, const float* value) {
  if (kv.kind == kFloat32) {
    std::memcpy((float*)kv.keys + at, key, sizeof(float) * kv.head_dim);
    std::memcpy((float*)kv.values + at, value, sizeof(float) * kv.head_dim);
    return;
  }
  if (kv.kind == kInt8) {
    int32_t sum;
    kv.key_scales[at / kv.head_dim] = into_bytes(key, kv.head_dim, (int8_t*)kv.keys + at, &sum);
    kv.value_scales[at / kv.head_dim] = into_bytes(value, kv.head_dim, (int8_t*)kv.values + at, &sum);
    return;
  }
  for (int d = 0; d < kv.head_dim; ++d) {
    ((uint16_t*)kv.keys)[at + d] = to_bfloat16(key[d]);
    ((uint16_t*)kv.values)[at + d] = to_bfloat16(value[d]);
  }
}

constexpr int kEverywhere = INT32_MAX;

// Positions of a view that a row sees, from `low` to before `end`. Below `straight` they are stored in their order; from
// there on `tail` has the row that each is stored in, counted from the committed ones.
struct Seen {
  int low, end, straight;
  std::vector<int32_t> tail;

  void look(const Part& part, const View& view, int row, const Sight& sight) {
    const int stride = part.scratch + part.count, width = sight.causal ? part.scratch + row + 1 : stride;
    const uint8_t* visible = part.visible ? part.visible + size_t(row) * stride : nullptr;
    const uint8_t* hidden = visible ? (const uint8_t*)std::memchr(visible, 0, width) : nullptr;
    const int leading = hidden ? int(hidden - visible) : width;
    tail.clear(), committed_ = view.count;
    end = view.count + leading, straight = kEverywhere;
    if (hidden && std::memchr(hidden, 1, width - leading)) {
      for (int other = 0; other < width; ++other)
        if (visible[other]) tail.push_back(other);
      straight = end, end = view.count + int(tail.size());
    }
    // A path's positions ascend: those that a window hides come first.
    const int64_t reach = sight.window ? part.positions[part.scratch + row] - sight.window : -1;
    low = view.from(reach + 1);
    while (low >= view.count && low < end && part.positions[place(low) - view.count] <= reach) ++low;
  }

  // A position counted in the order of storage, of which the view has the row.
  int place(int position) const { return position < straight ? position : committed_ + tail[position - committed_]; }

 private:
  int committed_ = 0;
};
