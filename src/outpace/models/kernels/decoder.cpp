// A decoder's pass over packed rows of many requests, in one call: every layer from the embeddings to the last norm.
//
// Threads share each step and meet behind it. Nothing here depends on their number.
#include "attention.h"
#include "product.h"

struct Layer {
  Matrix qkv, o, gate_up, down;
  // Norms' weights, null where the family has none: before and behind attention, before and behind the MLP.
  const float *before_attention, *behind_attention, *before_mlp, *behind_mlp;
  const float *q_norm, *k_norm;  // [head_dim], or of all heads together
  const float *cosines, *sines;  // [positions, rotated], null in a layer without rotation
  Sight sight;
  int32_t rotated;
};

struct Decoder {
  const Layer* layers;
  const float* last_norm;
  int32_t count, hidden, heads, kv_heads, head_dim, intermediate, activation;
  int32_t norms_all_heads;  // q_norm and k_norm are of all heads together
  float eps;
};

struct Pass {
  Store kv;
  const Part* parts;
  const int64_t* positions;  // [rows], where tables of rotations are read
  float* x;                  // [rows, hidden]: embeddings before, hidden states behind the last norm after
  float* const* taps;        // [count + 1], where hidden states before each layer go, null where nobody asked
  int32_t part_count, rows;
};

namespace {

// The threads of this process: a fork has none but the one that made it. Never destroyed, for they sleep until the end.
Pool& pool() {
  static std::atomic<Pool*> threads{nullptr};
  static std::atomic<pid_t> owner{0};
  if (owner.load() != getpid()) threads.store(new Pool), owner.store(getpid());
  return *threads.load();
}

// An operand for products of `rows` rows with matrices of up to `inputs` inputs, and the room for a row in work.
struct Space {
  std::vector<char> numbers;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  void grow(int rows, int inputs) {
    numbers.resize(size_t(rows) * operand_stride(inputs) * sizeof(float));
    scales.resize(rows), sums.resize(rows);
  }
  Operand operand(const Matrix& m) { return {numbers.data(), scales.data(), sums.data(), operand_stride(m.inputs)}; }
};

struct Work {
  Space space;
  std::vector<float> qkv, attended, gate_up, added, buffer;
};

// Rows [rows, width] made the left side of a product, through a norm where there is one.
void prepare_rows(Team& team, const float* from, int rows, const float* norm, float eps, const Matrix& m, Space& space,
                  float* buffer) {
  const Operand to = space.operand(m);
  team.share(rows, [&](int row) {
    const float* source = from + size_t(row) * m.inputs;
    float* own = buffer + size_t(row) * m.inputs;
    if (norm) rms_norm(source, norm, eps, m.inputs, own);
    else std::memcpy(own, source, sizeof(float) * m.inputs);
    prepare(own, m.inputs, m.kind, m.block, to, row);
  });
}

// x += product, normed on its way where the family says so.
void add_product(Team& team, const Matrix& m, Space& space, const float* norm, float eps, int rows, float* x,
                 float* added) {
  if (!norm) {
    multiply(team, m, space.operand(m), rows, true, x, m.outputs);
    return;
  }
  multiply(team, m, space.operand(m), rows, false, added, m.outputs);
  team.share(rows, [&](int row) {
    float *own = added + size_t(row) * m.outputs, *to = x + size_t(row) * m.outputs;
    rms_norm(own, norm, eps, m.outputs, own);
    for (int at = 0; at < m.outputs; ++at) to[at] += own[at];
  });
}

const Part& part_of(const Pass& pass, int row) {
  int part = 0;
  while (row >= pass.parts[part].start + pass.parts[part].count) ++part;
  return pass.parts[part];
}

void norm_heads(const Decoder& d, const float* weight, int heads, float* row) {
  if (!weight) return;
  const int width = d.norms_all_heads ? heads * d.head_dim : d.head_dim;
  for (int at = 0; at < heads * d.head_dim; at += width) rms_norm(row + at, weight, d.eps, width, row + at);
}

// Norm and rotate queries and keys of a row in place, and file its keys and values.
void place_row(const Decoder& d, const Pass& pass, int index, int row, float* qkv) {
  const Layer& layer = d.layers[index];
  const int width = d.head_dim;
  float *keys = qkv + d.heads * width, *values = keys + d.kv_heads * width;
  norm_heads(d, layer.q_norm, d.heads, qkv);
  norm_heads(d, layer.k_norm, d.kv_heads, keys);
  if (layer.cosines) {
    const size_t at = size_t(pass.positions[row]) * layer.rotated;
    for (int head = 0; head < d.heads + d.kv_heads; ++head)
      rotate(qkv + head * width, layer.cosines + at, layer.sines + at, layer.rotated);
  }
  const Part& part = part_of(pass, row);
  const int where = part.committed + part.scratch + row - part.start;
  for (int head = 0; head < d.kv_heads; ++head)
    file(pass.kv, place(pass.kv, index, part.slot, head, where), keys + head * width, values + head * width);
}

void run_layer(Team& team, const Decoder& d, const Pass& pass, int index, Work& work) {
  const Layer& layer = d.layers[index];
  const int width = d.head_dim, rows = pass.rows, all = (d.heads + 2 * d.kv_heads) * width;
  float* buffer = work.buffer.data();
  prepare_rows(team, pass.x, rows, layer.before_attention, d.eps, layer.qkv, work.space, buffer);
  multiply(team, layer.qkv, work.space.operand(layer.qkv), rows, false, work.qkv.data(), all);
  team.share(rows, [&](int row) { place_row(d, pass, index, row, &work.qkv[size_t(row) * all]); });
  attend_parts(team, pass.kv, pass.parts, pass.part_count, index, d.heads, d.kv_heads, layer.sight, work.qkv.data(), all,
               work.attended.data(), d.heads * width);
  prepare_rows(team, work.attended.data(), rows, nullptr, 0, layer.o, work.space, buffer);
  add_product(team, layer.o, work.space, layer.behind_attention, d.eps, rows, pass.x, work.added.data());
  prepare_rows(team, pass.x, rows, layer.before_mlp, d.eps, layer.gate_up, work.space, buffer);
  const int inner = d.intermediate;
  multiply(team, layer.gate_up, work.space.operand(layer.gate_up), rows, false, work.gate_up.data(), 2 * inner);
  const Operand to = work.space.operand(layer.down);
  team.share(rows, [&](int row) {
    float* own = buffer + size_t(row) * inner;
    gate(&work.gate_up[size_t(row) * 2 * inner], inner, d.activation, own);
    prepare(own, inner, layer.down.kind, layer.down.block, to, row);
  });
  add_product(team, layer.down, work.space, layer.behind_mlp, d.eps, rows, pass.x, work.added.data());
}

void keep_tap(Team& team, const Decoder& d, const Pass& pass, int index) {
  if (!pass.taps[index]) return;
  team.share(pass.rows, [&](int row) {
    const size_t at = size_t(row) * d.hidden;
    std::memcpy(pass.taps[index] + at, pass.x + at, sizeof(float) * d.hidden);
  });
}

}  // namespace

extern "C" {

void outpace_run(const Decoder* decoder, const Pass* pass, int32_t threads) {
  const Decoder& d = *decoder;
  const int rows = pass->rows, width = d.head_dim;
  const int widest = std::max({d.hidden, d.intermediate, d.heads * width});
  static thread_local Work work;
  Work& own = work;
  own.space.grow(rows, widest);
  own.qkv.resize(size_t(rows) * (d.heads + 2 * d.kv_heads) * width);
  own.attended.resize(size_t(rows) * d.heads * width);
  own.gate_up.resize(size_t(rows) * 2 * d.intermediate);
  own.added.resize(size_t(rows) * d.hidden);
  own.buffer.resize(size_t(rows) * widest);
  pool().run(threads, [&](Team& team) {
    for (int index = 0; index < d.count; ++index) {
      keep_tap(team, d, *pass, index);
      run_layer(team, d, *pass, index, own);
    }
    team.share(rows, [&](int row) {
      float* x = pass->x + size_t(row) * d.hidden;
      rms_norm(x, d.last_norm, d.eps, d.hidden, x);
    });
    keep_tap(team, d, *pass, d.count);
  });
}

// to[row] = weight * from[row] + bias.
void outpace_linear(const Matrix* matrix, const float* from, int32_t rows, float* to, int32_t threads) {
  static thread_local Work work;
  Work& own = work;
  own.space.grow(rows, matrix->inputs);
  own.buffer.resize(size_t(rows) * matrix->inputs);
  pool().run(threads, [&](Team& team) {
    prepare_rows(team, from, rows, nullptr, 0, *matrix, own.space, own.buffer.data());
    multiply(team, *matrix, own.space.operand(*matrix), rows, false, to, matrix->outputs);
  });
}

// Attention of a packed pass: queries and results [rows, heads, head_dim], keys and values already in the store.
void outpace_attend(const Store* kv, const Part* parts, int32_t part_count, int32_t layer, int32_t heads,
                    int32_t kv_heads, const Sight* sight, const float* query, float* out, int32_t threads) {
  const int width = heads * kv->head_dim;
  pool().run(threads, [&](Team& team) {
    attend_parts(team, *kv, parts, part_count, layer, heads, kv_heads, *sight, query, width, out, width);
  });
}

int64_t outpace_packed_bytes(const Matrix* m) { return int64_t((m->outputs + kPanel - 1) / kPanel) * panel_bytes(*m); }

// Lay out a weight [outputs, inputs], float32, in panels; int8 is rotated and rounded on the way.
void outpace_pack(const Matrix* m, const float* weight, void* panels, float* scales, int32_t threads) {
  const int together = inputs_together(m->kind), stride = padded(m->inputs);
  std::memset(panels, 0, outpace_packed_bytes(m));
  pool().run(threads, [&](Team& team) {
    team.share((m->outputs + kPanel - 1) / kPanel, [&](int panel) {
      std::vector<float> row(m->inputs), numbers(stride);
      char* base = (char*)panels + panel * panel_bytes(*m);
      if (m->kind == kInt8) std::memset(base, 128, panel_bytes(*m));
      const int count = std::min(kPanel, m->outputs - panel * kPanel);
      for (int output = 0; output < count; ++output) {
        const int index = panel * kPanel + output;
        std::memcpy(row.data(), weight + size_t(index) * m->inputs, sizeof(float) * m->inputs);
        int32_t total;
        const Operand to = {numbers.data(), scales + index, &total, stride};
        prepare(row.data(), m->inputs, m->kind, m->block, to, 0);
        for (int k = 0; k < m->inputs; ++k) {
          const size_t at = (size_t(k / together) * kPanel + output) * together + k % together;
          if (m->kind == kFloat32) ((float*)base)[at] = numbers[k];
          else if (m->kind == kBfloat16) ((uint16_t*)base)[at] = ((uint16_t*)numbers.data())[k];
          else if (m->kind == kWidened) ((uint16_t*)base)[at] = to_bfloat16(numbers[k]);
          else ((uint8_t*)base)[at] = uint8_t(((int8_t*)numbers.data())[k] + 128);
        }
      }
    });
  });
}

// The `wanted` largest numbers of each row and where they are, largest first, the earlier of equals first.
void outpace_top(const float* numbers, int32_t rows, int32_t width, int32_t wanted, float* values, int64_t* ids,
                 int32_t threads) {
  pool().run(rows > 1 ? threads : 1, [&](Team& team) {
    team.share(rows, [&](int row) {
      const float* from = numbers + size_t(row) * width;
      float* best = values + size_t(row) * wanted;
      int64_t* where = ids + size_t(row) * wanted;
      int found = 0;
      const auto insert = [&](float number, int64_t at) {
        int place = found < wanted ? found++ : wanted - 1;
        for (; place > 0 && best[place - 1] < number; --place) best[place] = best[place - 1], where[place] = where[place - 1];
        best[place] = number, where[place] = at;
      };
      int at = 0;
      for (; at < wanted; ++at) insert(from[at], at);
      for (; at + kLanes <= width; at += kLanes) {
        if (largest(load(from + at)) <= best[wanted - 1]) continue;
        for (int lane = 0; lane < kLanes; ++lane)
          if (from[at + lane] > best[wanted - 1]) insert(from[at + lane], at + lane);
      }
      for (; at < width; ++at)
        if (from[at] > best[wanted - 1]) insert(from[at], at);
    });
  });
}
}
