// A decoder's pass over packed rows of many requests: every layer from the embeddings to the last norm.
// Python reference: the modules of the layers, as outpace.models.packed and the nets of drafters run them.
//
// Threads share each step and meet after it. No result depends on their number.
#pragma once
#include "attention.h"
#include "product.h"

struct Layer {
  Matrix qkv, o, gate_up, down;
  // Weights of norms, null where the family has none: before and after attention, before and after the MLP.
  const float *before_attention, *after_attention, *before_mlp, *after_mlp;
  const float *q_norm, *k_norm;  // [head_dim], or of all heads together
  const float* embedding_norm;      // EAGLE's: of the embeddings that stand before the rows in what qkv reads; else null
  const float *cosines, *sines;  // [positions, rotated], null in a layer without rotation
  Sight sight;
  int32_t rotated;
};

struct Decoder {
  const Layer* layers;
  const float* last_norm;
  int32_t count, hidden, heads, kv_heads, head_dim, intermediate, activation;
  int32_t norms_all_heads;  // q_norm and k_norm are of all heads together
  int32_t adds_to_normed;   // attention is added to the normed rows, not to the rows themselves
  float eps;
};

struct Pass {
  Store kv;
  const Part* parts;
  float* x;                  // [rows, hidden]: embeddings before, hidden states behind the last norm after
  const float* embeddings;   // [rows, hidden]: embeddings, for layers with `embedding_norm`
  float* raw;                // [rows, hidden]: where hidden states before the last norm go, or null
  float* const* taps;        // [count + 1], where hidden states before each layer go, null for layers without a tap
  int32_t part_count, rows;
};

// An operand for products of `rows` rows with matrices of up to `inputs` inputs, and the room for a row in work.
struct Space {
  std::vector<char> numbers;
  std::vector<float> scales, less;
  std::vector<int32_t> sums;

  void grow(int rows, int inputs) {
    numbers.resize(size_t(rows) * operand_stride(inputs) * sizeof(float));
    const size_t parts = size_t(rows) * (inputs / kPart + 1);
    scales.resize(parts), less.resize(parts), sums.resize(2 * parts);
  }
  Operand operand(const Matrix& m, int rows) {
    return {numbers.data(), scales.data(), less.data(), sums.data(), operand_stride(m.inputs), rows};
  }
};

struct Work {
  Space space;
  std::vector<float> qkv, attended, gate_up, added, sums;

  void grow(const Decoder& d, int rows, int inputs = 0) {
    space.grow(rows, std::max({2 * d.hidden, d.intermediate, d.heads * d.head_dim, inputs}));
    qkv.resize(size_t(rows) * (d.heads + 2 * d.kv_heads) * d.head_dim);
    attended.resize(size_t(rows) * d.heads * d.head_dim);
    gate_up.resize(size_t(rows) * 2 * d.intermediate);
    added.resize(size_t(rows) * d.hidden);
  }
};

// A thread's own room for a row: memory that several threads write moves between their caches.
static inline float* row_space(int width) {
  static thread_local std::vector<float> numbers;
  if (numbers.size() < size_t(width)) numbers.resize(width);
  return numbers.data();
}

// Rows made the left side of a product. `fill(row, first, last, to)` gives numbers of a row.
template <class Fill>
static inline void prepare_each(Team& team, const Matrix& m, int rows, Space& space, Fill fill) {
  const Operand to = space.operand(m, rows);
  if (!is_from_file(m.kind)) {
    team.share(rows, [&](int row) {
      float* own = row_space(m.inputs);
      fill(row, 0, m.inputs, own);
      prepare(own, m.inputs, m.kind, m.block, to, row);
    });
    return;
  }
  // A tile's rows lie in the same lines of a cache: threads take whole tiles or, of few, some inputs of all their rows.
  const int parts = m.inputs / kPart, height = tile_height(rows), tiles = (rows + height - 1) / height;
  const int shares = (team.size + tiles - 1) / tiles;
  team.share(tiles * shares, [&](int piece) {
    const int begin = piece / shares * height, share = piece % shares;
    const int first = parts * share / shares, last = parts * (share + 1) / shares;
    float* own = row_space((last - first) * kPart);
    for (int row = begin; row < std::min(begin + height, rows); ++row) {
      fill(row, first * kPart, last * kPart, own);
      into_parts(own, first, last, parts, to, row);
    }
  });
}

// The same of rows [rows, inputs], through a norm where there is one.
static inline void prepare_rows(Team& team, const float* from, int rows, const float* norm, float eps, const Matrix& m, Space& space) {
  prepare_each(team, m, rows, space, [&](int row, int first, int last, float* to) {
    const float* own = from + size_t(row) * m.inputs;
    if (norm) rms_norm(own, norm, eps, m.inputs, first, last, to);
    else std::memcpy(to, own + first, sizeof(float) * (last - first));
  });
}

// x += product, normed before that if the family does so.
static inline void add_product(Team& team, const Matrix& m, Space& space, const float* norm, float eps, int rows, float* x,
                 float* added) {
  if (!norm) {
    multiply(team, m, space.operand(m, rows), true, x, m.outputs);
    return;
  }
  multiply(team, m, space.operand(m, rows), false, added, m.outputs);
  team.share(rows, [&](int row) {
    float *own = added + size_t(row) * m.outputs, *to = x + size_t(row) * m.outputs;
    rms_norm(own, norm, eps, m.outputs, own);
    for (int at = 0; at < m.outputs; ++at) to[at] += own[at];
  });
}

static inline const Part& part_of(const Pass& pass, int row) {
  int part = 0;
  while (row >= pass.parts[part].start + pass.parts[part].count) ++part;
  return pass.parts[part];
}

static inline void norm_heads(const Decoder& d, const float* weight, int heads, float* row) {
  if (!weight) return;
  const int width = d.norms_all_heads ? heads * d.head_dim : d.head_dim;
  for (int at = 0; at < heads * d.head_dim; at += width) rms_norm(row + at, weight, d.eps, width, row + at);
}

// Norm and rotate some heads of a row in place.
static inline void turn_heads(const Decoder& d, const Layer& layer, const Pass& pass, int row, const float* norm, int heads,
                              float* own) {
  norm_heads(d, norm, heads, own);
  if (!layer.cosines) return;
  const Part& part = part_of(pass, row);
  const size_t at = size_t(part.positions[part.scratch + row - part.start]) * layer.rotated;
  for (int head = 0; head < heads; ++head)
    rotate(own + head * d.head_dim, layer.cosines + at, layer.sines + at, layer.rotated);
}

// Norm and rotate the keys of a row in place, and file them with the values behind them.
static inline void place_keys(const Decoder& d, const Pass& pass, int index, int row, float* keys) {
  turn_heads(d, d.layers[index], pass, row, d.layers[index].k_norm, d.kv_heads, keys);
  shift(pass.kv, index, keys, d.kv_heads);
  const Part& part = part_of(pass, row);
  const int where = part.committed + part.scratch + row - part.start, width = d.head_dim;
  const float* values = keys + d.kv_heads * width;
  for (int head = 0; head < d.kv_heads; ++head)
    file(pass.kv, place(pass.kv, index, part.slot, head, where), keys + head * width, values + head * width);
}

// What a layer's attention reads of the rows, made the left side of its product.
static inline void prepare_attention(Team& team, const Decoder& d, const Layer& layer, const Pass& pass, Work& work) {
  if (!layer.embedding_norm) {
    prepare_rows(team, pass.x, pass.rows, layer.before_attention, d.eps, layer.qkv, work.space);
    return;
  }
  const int width = d.hidden;
  prepare_each(team, layer.qkv, pass.rows, work.space, [&](int row, int first, int last, float* to) {
    const size_t at = size_t(row) * width;
    const int middle = std::clamp(width, first, last);
    rms_norm(pass.embeddings + at, layer.embedding_norm, d.eps, width, first, middle, to);
    rms_norm(pass.x + at, layer.before_attention, d.eps, width, middle - width, last - width, to + middle - first);
  });
  if (!d.adds_to_normed) return;
  team.share(pass.rows, [&](int row) {
    float* own = pass.x + size_t(row) * width;
    rms_norm(own, layer.before_attention, d.eps, width, own);
  });
}

static inline void run_layer(Team& team, const Decoder& d, const Pass& pass, int index, Work& work) {
  const Layer& layer = d.layers[index];
  const int width = d.head_dim, rows = pass.rows, all = (d.heads + 2 * d.kv_heads) * width;
  prepare_attention(team, d, layer, pass, work);
  multiply(team, layer.qkv, work.space.operand(layer.qkv, rows), false, work.qkv.data(), all);
  team.share(rows, [&](int row) {
    float* own = &work.qkv[size_t(row) * all];
    turn_heads(d, layer, pass, row, layer.q_norm, d.heads, own);
    spread(pass.kv, own, d.heads);
    place_keys(d, pass, index, row, own + d.heads * width);
  });
  const Attention attention = {pass.kv,    pass.parts, pass.part_count, index, d.heads, d.kv_heads, layer.sight, work.qkv.data(),
                               work.attended.data(), all, d.heads * width};
  attend_parts(team, attention, work.sums.data());
  prepare_rows(team, work.attended.data(), rows, nullptr, 0, layer.o, work.space);
  add_product(team, layer.o, work.space, layer.after_attention, d.eps, rows, pass.x, work.added.data());
  prepare_rows(team, pass.x, rows, layer.before_mlp, d.eps, layer.gate_up, work.space);
  const int inner = d.intermediate;
  multiply(team, layer.gate_up, work.space.operand(layer.gate_up, rows), false, work.gate_up.data(), 2 * inner);
  prepare_each(team, layer.down, rows, work.space, [&](int row, int first, int last, float* to) {
    const float* own = &work.gate_up[size_t(row) * 2 * inner + first];
    gate(own, own + inner, last - first, d.activation, to);
  });
  add_product(team, layer.down, work.space, layer.after_mlp, d.eps, rows, pass.x, work.added.data());
}

static inline void keep_tap(Team& team, const Decoder& d, const Pass& pass, int index) {
  if (!pass.taps[index]) return;
  team.share(pass.rows, [&](int row) {
    const size_t at = size_t(row) * d.hidden;
    std::memcpy(pass.taps[index] + at, pass.x + at, sizeof(float) * d.hidden);
  });
}

static inline void run_layers(Team& team, const Decoder& d, const Pass& pass, Work& work) {
  for (int index = 0; index < d.count; ++index) {
    keep_tap(team, d, pass, index);
    run_layer(team, d, pass, index, work);
  }
  team.share(pass.rows, [&](int row) {
    float* x = pass.x + size_t(row) * d.hidden;
    if (pass.raw) std::memcpy(pass.raw + size_t(row) * d.hidden, x, sizeof(float) * d.hidden);
    rms_norm(x, d.last_norm, d.eps, d.hidden, x);
  });
  keep_tap(team, d, pass, d.count);
}
