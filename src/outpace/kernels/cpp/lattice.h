// Pair scores of neighbouring candidates of a block, and the best-first tree over their probabilities.
// Python reference: outpace.drafters.lattice.reference.weave.
#pragma once
#include <cmath>
#include <cstdint>
#include <queue>
#include <vector>

#include "noise.h"

// One request's block of `depth` positions with `width` candidates each.
struct Lattice {
  const float* pending;     // [rank] A of the pending token
  const float* a;           // rows [rank], by place
  const float* b;           // the same
  const int64_t* places;    // [depth, width] rows of a and b
  const int64_t* ids;       // [depth, width]
  const float* gates;       // [depth, rank] H of the block's outputs
  const float* base;        // [depth, width] base logits
  const float* others;      // [depth] logit of all ids that are no candidates
  const float* sharpness;   // [depth] 1 / the temperature of calibration
  const int32_t* noise;     // [depth, 2] keys of the target's draws; null without noise
  const int64_t* endings;
  float* scores;            // [depth, width before, width] logits; of the first depth only the first row
  float* log_mass;          // [depth, width before] logarithm of the probability of all candidates together
  int64_t* tokens;          // [budget + 1], the first one given
  int64_t* parents;
  float* path_scores;
  float temperature;        // of the request
  int32_t depth, width, rank, ending_count, budget, max_depth;
  int32_t count;            // nodes of the tree
};

// log(e^x of the row), for few numbers.
static inline float log_sum(const float* row, int width) {
  float top = row[0];
  for (int at = 1; at < width; ++at) top = std::max(top, row[at]);
  float total = 0;
  for (int at = 0; at < width; ++at) total += std::exp(row[at] - top);
  return top + std::log(total);
}

static inline void score_pairs(Lattice& one) {
  const int width = one.width, rank = one.rank;
  std::vector<float> gated(rank), row(width + 1);
  for (int depth = 0; depth < one.depth; ++depth) {
    const float *gate = one.gates + size_t(depth) * rank, sharpness = one.sharpness[depth];
    for (int before = 0; before < (depth ? width : 1); ++before) {
      const float* a = depth ? one.a + size_t(one.places[(depth - 1) * width + before]) * rank : one.pending;
      for (int at = 0; at < rank; ++at) gated[at] = a[at] * gate[at];
      const size_t from = size_t(depth) * width + before;
      float* scores = one.scores + from * width;
      for (int after = 0; after < width; ++after) {
        const int at = depth * width + after;
        scores[after] = sharpness * (one.base[at] + dot(gated.data(), one.b + size_t(one.places[at]) * rank, rank));
        row[after] = scores[after] / one.temperature;
      }
      row[width] = sharpness * one.others[depth] / one.temperature;
      one.log_mass[from] = log_sum(row.data(), width) - log_sum(row.data(), width + 1);
    }
  }
}

// Of all candidates below the nodes of the tree, the one with the most probable path joins next.
static inline void grow_best_first(Lattice& one) {
  struct Offer {
    float score;
    int32_t order, parent, depth, column;
    bool operator<(const Offer& other) const {
      return score != other.score ? score < other.score : order > other.order;
    }
  };
  const int width = one.width;
  std::vector<float> noise(one.noise ? size_t(one.depth) * width : 0), row(width);
  for (size_t at = 0; at < noise.size(); ++at) noise[at] = float(gumbel(one.noise + 2 * (at / width), one.ids[at]));
  std::priority_queue<Offer> offers;
  int32_t order = 0;
  const auto offer = [&](int32_t node, int depth, int before) {
    if (depth >= std::min(one.depth, one.max_depth)) return;
    const size_t from = size_t(depth) * width + before;
    for (int at = 0; at < width; ++at)
      row[at] = one.scores[from * width + at] / one.temperature + (one.noise ? noise[depth * width + at] : 0.0f);
    const float shift = one.log_mass[from] - log_sum(row.data(), width) + one.path_scores[node];
    for (int at = 0; at < width; ++at) offers.push({row[at] + shift, order++, node, depth, at});
  };
  one.parents[0] = -1, one.path_scores[0] = 0, one.count = 1;
  if (one.budget) offer(0, 0, 0);
  while (one.count <= one.budget && !offers.empty()) {
    const Offer best = offers.top();
    offers.pop();
    const int32_t node = one.count++;
    one.tokens[node] = one.ids[best.depth * width + best.column];
    one.parents[node] = best.parent, one.path_scores[node] = best.score;
    if (std::find(one.endings, one.endings + one.ending_count, one.tokens[node]) == one.endings + one.ending_count)
      offer(node, best.depth + 1, best.column);
  }
}
