// Domino's causal head: a step of its GRU over drafted tokens, and the correction of base logits.
// Python reference: outpace.drafters.domino.net.DominoHead (step, correction).
#pragma once
#include "decoder.h"
#include "topk.h"

// A GRU over drafted tokens, and a low-rank product of its state and the block's output (section 4.1.2).
struct CausalHead {
  Matrix of_input, of_state;  // [3 * state, hidden] and [3 * state, state]: reset, update and new gate
  Matrix down, up;            // [rank, hidden + state] and [ids, rank]
  int32_t hidden, state, rank;
};

struct Correction {
  const float* embeddings;      // [rows, hidden] of one more token in each row
  const float* const* before;   // [rows] of [state]
  const float* const* outputs;  // [rows] of [hidden], of the block; null if logits stay the base ones
  const float* const* base;     // [rows] of [ids], base logits
  float* after;                 // [rows, state]
  float* logits;                // [rows, ids]; null for the best ones
  float* best;                  // [rows, wanted] logarithms of the best ids' probabilities; null for logits
  int64_t* ids;                 // [rows, wanted]
  const KeyedDraws* draws;      // whose noise decides which ids are best; null where logits do
  int32_t rows, wanted;
};

struct HeadWork {
  Space space;
  std::vector<float> of_input, of_state, low, logits, noise;

  void grow(const CausalHead& head, const Correction& at) {
    const int rows = at.rows;
    if (!at.logits) logits.resize(size_t(rows) * head.up.outputs);
    if (at.draws) noise.resize(size_t(at.draws->count) * head.up.outputs);
    space.grow(rows, std::max(head.hidden + head.state, head.rank));
    of_input.resize(size_t(rows) * 3 * head.state);
    of_state.resize(size_t(rows) * 3 * head.state);
    low.resize(size_t(rows) * head.rank);
  }
};

static inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(smaller(-x, all(87.0f)))); }

// `work(at, count)` for each vector of `width` numbers, of which the last one may have fewer.
template <class Work>
static inline void each_vector(int width, Work work) {
  int at = 0;
  for (; at + kLanes <= width; at += kLanes) work(at, kLanes);
  if (at < width) work(at, width - at);
}

static inline Lanes load_some(const float* from, int count) {
  Lanes lanes = {};
  if (count == kLanes) return load(from);
  std::memcpy(&lanes, from, sizeof(float) * count);
  return lanes;
}

static inline void store_some(float* to, Lanes lanes, int count) {
  if (count == kLanes) store(to, lanes);
  else std::memcpy(to, &lanes, sizeof(float) * count);
}

// The states after one more token, and the operand of the low-rank product.
static inline void step(Team& team, const CausalHead& head, const Correction& at, HeadWork& work) {
  const int rows = at.rows, gates = 3 * head.state;
  prepare_rows(team, at.embeddings, rows, nullptr, 0, head.of_input, work.space);
  multiply(team, head.of_input, work.space.operand(head.of_input, rows), false, work.of_input.data(), gates);
  prepare_each(team, head.of_state, rows, work.space, [&](int row, int first, int last, float* to) {
    std::memcpy(to, at.before[row] + first, sizeof(float) * (last - first));
  });
  multiply(team, head.of_state, work.space.operand(head.of_state, rows), false, work.of_state.data(), gates);
  team.share(rows, [&](int row) {
    const float *input = &work.of_input[size_t(row) * gates], *old = &work.of_state[size_t(row) * gates];
    const float* before = at.before[row];
    float* after = at.after + size_t(row) * head.state;
    each_vector(head.state, [&](int n, int count) {
      const auto gate = [&](const float* from, int which) { return load_some(from + which * head.state + n, count); };
      const Lanes reset = sigmoid(gate(input, 0) + gate(old, 0)), update = sigmoid(gate(input, 1) + gate(old, 1));
      const Lanes candidate = 2.0f * sigmoid(2.0f * (gate(input, 2) + reset * gate(old, 2))) - 1.0f;  // tanh
      store_some(after + n, candidate + update * (load_some(before + n, count) - candidate), count);
    });
  });
  if (!at.outputs) return;
  prepare_each(team, head.down, rows, work.space, [&](int row, int first, int last, float* to) {
    const int middle = std::clamp(head.hidden, first, last);
    std::memcpy(to, at.outputs[row] + first, sizeof(float) * (middle - first));
    std::memcpy(to + middle - first, at.after + size_t(row) * head.state + middle - head.hidden, sizeof(float) * (last - middle));
  });
}

static inline void correct(Team& team, const CausalHead& head, const Correction& at, HeadWork& work) {
  const int rows = at.rows, ids = head.up.outputs;
  float* logits = at.logits ? at.logits : work.logits.data();
  step(team, head, at, work);
  team.share(rows, [&](int row) { std::memcpy(logits + size_t(row) * ids, at.base[row], sizeof(float) * ids); });
  if (at.outputs) {
    multiply(team, head.down, work.space.operand(head.down, rows), false, work.low.data(), head.rank);
    prepare_each(team, head.up, rows, work.space, [&](int row, int first, int last, float* to) {
      const float* own = &work.low[size_t(row) * head.rank + first];
      each_vector(last - first, [&](int n, int count) {
        const Lanes x = load_some(own + n, count);
        store_some(to + n, x * sigmoid(x), count);
      });
    });
    multiply(team, head.up, work.space.operand(head.up, rows), true, logits, ids);
  }
  if (!at.best) return;
  if (at.draws) compute_noise(team, *at.draws, ids, work.noise.data());
  team.share(rows, [&](int row) {
    const size_t first = size_t(row) * at.wanted;
    if (at.draws) add_noise(*at.draws, row, ids, work.noise.data(), logits + size_t(row) * ids);
    find_largest(logits + size_t(row) * ids, ids, at.wanted, true, at.best + first, at.ids + first);
  });
}
