// Slots of keys and values, and what of them a row sees.
// Python reference: outpace.cache.slots (SlotKV, Segment).
#pragma once
#include <vector>

#include "rows.h"

// Keys and values [layers, slots, kv_heads, capacity, head_dim], strides in numbers. Up to 15 rows behind the last one
// that is in use can be read.
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

constexpr int kEverywhere = INT32_MAX;

// Positions that a row sees, from `low` to before `end`. Below `straight` they are stored in their order; from there on
// `tail` has the row that each is stored in, counted from the committed ones.
struct Seen {
  int low, end, straight;
  std::vector<int32_t> tail;

  void look(const Part& part, int row, const Sight& sight) {
    const int stride = part.scratch + part.count, width = sight.causal ? part.scratch + row + 1 : stride;
    const uint8_t* visible = part.visible ? part.visible + size_t(row) * stride : nullptr;
    const uint8_t* hidden = visible ? (const uint8_t*)std::memchr(visible, 0, width) : nullptr;
    const int leading = hidden ? int(hidden - visible) : width;
    tail.clear(), committed_ = part.committed;
    end = part.committed + leading, straight = kEverywhere;
    if (hidden && std::memchr(hidden, 1, width - leading)) {
      for (int other = 0; other < width; ++other)
        if (visible[other]) tail.push_back(other);
      straight = end, end = part.committed + int(tail.size());
    }
    // A path's positions ascend: those that a window hides come first.
    const int64_t reach = sight.window ? part.positions[part.scratch + row] - sight.window : -1;
    low = int(std::min<int64_t>(std::max<int64_t>(reach + 1, 0), part.committed));
    while (low >= part.committed && low < end && part.positions[place(low) - part.committed] <= reach) ++low;
  }

  // The row of the slot that a position is stored in.
  int place(int position) const { return position < straight ? position : committed_ + tail[position - committed_]; }

 private:
  int committed_ = 0;
};
