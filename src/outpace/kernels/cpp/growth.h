// Best-first growth of the union's trees, and learning of the acceptance model's weights.
// Python reference: outpace.trees.union.reference.ReferenceGrower.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <queue>
#include <vector>

#include "noise.h"
#include "suffix.h"

constexpr int kSuccessors = 8, kSources = 5;
constexpr int kPending = 0, kDraftedOrigin = 1, kRetrievedOrigin = 2, kMatchedOrigin = 3;

// Which weight each feature has (trees/union/acceptance.py).
struct Layout {
  int32_t drafted, passed_over, undrafted, paired, outranked, unpaired, ranked, unranked, matched, unmatched, noisy,
      quiet, noises, match_count, share_count;
  int32_t matches[8];
  double drafted_from[24];
};

// Rows by the last two tokens (trees/retrieval/transition_matrix.py).
struct Pairs {
  const int64_t* keys;
  const int32_t* rows;
  uint64_t factor;
  int32_t bits;
};

// One request's tree. The candidates below node n are those from named_from[n] to named_from[n + 1].
struct Growing {
  Automaton* text;            // null without text
  const int64_t* successors;  // [V, 8]; null without transitions
  const Pairs* pairs;         // null without pairs
  const double* weights;
  const int64_t* draft_tokens;  // of the draft's tree
  const int64_t* draft_parents;
  const float* draft_scores;
  const int64_t* endings;
  const int32_t* noise;        // [depths, 2] keys of the target's draws; null without noise
  const double* least_gains;  // by count of nodes; null for no limit
  int64_t* tokens;            // [budget + 1], the first one given
  int64_t* parents;
  int64_t* drafted;
  int64_t* origins;  // source of each node (core/events.py)
  double* gains;
  int64_t* named_from;   // [budget + 2]
  int64_t* named;        // candidates below each node, from named_from[node] on
  uint8_t* features;     // the same, of kSources each
  int64_t vocabulary, before;
  int32_t draft_count, ending_count, least_count, budget, max_depth;
  int32_t count, expanded;  // nodes, and how many of them were expanded
};

static inline double odds_of(const double* weights, const uint8_t* features) {
  double sum = 0;
  for (int source = 0; source < kSources; ++source) sum += weights[features[source]];
  return std::exp(weights[0] + sum);
}

struct Grower {
  const Layout& layout;
  Growing& tree;
  std::vector<int32_t> first_child, next_child;  // of the draft's nodes
  struct Offer {
    double gain;
    int32_t order, parent, depth, named;
    int64_t token, drafted;
    Place place;
    bool operator<(const Offer& other) const {
      return gain != other.gain ? gain < other.gain : order > other.order;
    }
  };
  std::priority_queue<Offer> offers;
  std::vector<double> odds;
  int32_t order = 0, used = 0;

  Grower(const Layout& of, Growing& one) : layout(of), tree(one) {
    first_child.assign(tree.draft_count, -1), next_child.assign(tree.draft_count, -1);
    for (int node = tree.draft_count - 1; node > 0; --node) {
      next_child[node] = first_child[tree.draft_parents[node]];
      first_child[tree.draft_parents[node]] = node;
    }
  }

  // The features of a candidate below the current node, which is added if it is new.
  uint8_t* name(int32_t from, int64_t token, const uint8_t* missing) {
    for (int32_t at = from; at < used; ++at)
      if (tree.named[at] == token) return tree.features + size_t(at) * kSources;
    tree.named[used] = token;
    uint8_t* features = tree.features + size_t(used++) * kSources;
    std::memcpy(features, missing, kSources);
    return features;
  }

  bool is_ending(int64_t token) const {
    return std::find(tree.endings, tree.endings + tree.ending_count, token) != tree.endings + tree.ending_count;
  }

  const int32_t* pair_row(int64_t before, int64_t token) const {
    if (!tree.pairs) return nullptr;
    const int64_t key = before * tree.vocabulary + token;
    const size_t at = uint64_t(key) * tree.pairs->factor >> (64 - tree.pairs->bits);
    return tree.pairs->keys[at] == key ? tree.pairs->rows + at * kSuccessors : nullptr;
  }

  void name_all(int32_t node, int32_t depth, Place place) {
    const int32_t from = used, source = int32_t(tree.drafted[node]);
    const int64_t token = tree.tokens[node], before = node ? tree.tokens[tree.parents[node]] : tree.before;
    const int32_t child = source < 0 || source >= tree.draft_count ? -1 : first_child[source];
    const int32_t* pair = pair_row(before, token);
    const int64_t* rank = tree.successors ? tree.successors + token * kSuccessors : nullptr;
    if (rank && rank[0] == rank[1]) rank = nullptr;  // never seen
    const uint8_t missing[kSources] = {uint8_t(child < 0 ? layout.undrafted : layout.passed_over),
                                       uint8_t(pair ? layout.outranked : layout.unpaired), uint8_t(layout.unranked),
                                       uint8_t(layout.unmatched), uint8_t(layout.quiet)};
    for (int32_t at = child; at >= 0; at = next_child[at]) {
      const double log_prob = double(tree.draft_scores[at]) - double(tree.draft_scores[source]);
      const double* shares = layout.drafted_from;
      const auto kind = std::upper_bound(shares, shares + layout.share_count, log_prob) - shares;
      name(from, tree.draft_tokens[at], missing)[0] = uint8_t(layout.drafted + kind);
    }
    const int32_t drafted_end = used;
    for (int place_in = 0; pair && place_in < kSuccessors; ++place_in)
      name(from, pair[place_in], missing)[1] = uint8_t(layout.paired + place_in);
    for (int place_in = 0; rank && place_in < kSuccessors; ++place_in)
      name(from, rank[place_in], missing)[2] = uint8_t(layout.ranked + place_in);
    if (tree.text) {
      const Automaton& text = *tree.text;
      while (place.state != 0 && text.states[place.state].end == int32_t(text.ids.size())) {
        place.state = text.states[place.state].link;
        place.length = text.states[place.state].length;
      }
      if (place.state != 0) {
        int kind = -1;
        for (int each = 0; each < layout.match_count; ++each) kind += place.length >= layout.matches[each];
        name(from, text.ids[text.states[place.state].end], missing)[3] = uint8_t(layout.matched + kind);
      }
    }
    // The score of a drafted candidate contains the noise already.
    for (int32_t at = tree.noise ? drafted_end : used; at < used; ++at) {
      const double floor = std::floor(gumbel(tree.noise + 2 * depth, tree.named[at])) + 1;
      const int kind = int(std::min(double(layout.noises - 1), std::max(0.0, floor)));
      tree.features[size_t(at) * kSources + 4] = uint8_t(layout.noisy + kind);
    }
  }

  void offer_all(int32_t node, int32_t depth, double gain, double least, Place place) {
    const int32_t from = used;
    name_all(node, depth, place);
    double total = 0;
    odds.clear();
    for (int32_t at = from; at < used; ++at) {
      odds.push_back(odds_of(tree.weights, tree.features + size_t(at) * kSources));
      total += odds.back();
    }
    total += 1;  // for none of them
    const int64_t source = tree.drafted[node];
    const int32_t first = source < 0 || source >= tree.draft_count ? -1 : first_child[source];
    for (int32_t at = from; at < used; ++at) {
      const double below = gain * (odds[at - from] / total);
      if (!(below >= least)) continue;
      int64_t drafted = -1;
      for (int32_t child = first; child >= 0; child = next_child[child])
        if (drafted < 0 && tree.draft_tokens[child] == tree.named[at]) drafted = child;
      offers.push({below, order++, node, depth + 1, at, tree.named[at], drafted, place});
    }
  }

  // The source of a candidate: the draft if it has it; of rows and text, the one with the larger weight.
  int32_t origin(int32_t at) const {
    const uint8_t* features = tree.features + size_t(at) * kSources;
    const double* weights = tree.weights;
    if (features[0] < layout.passed_over) return kDraftedOrigin;
    if (features[3] == layout.unmatched) return kRetrievedOrigin;
    const bool is_paired = features[1] < layout.outranked;
    if (!is_paired && features[2] == layout.unranked) return kMatchedOrigin;
    const double of_rows = weights[features[2]] - weights[layout.unranked] +
                           (is_paired ? weights[features[1]] - weights[layout.outranked] : 0.0);
    return weights[features[3]] - weights[layout.unmatched] >= of_rows ? kMatchedOrigin : kRetrievedOrigin;
  }

  void grow() {
    tree.parents[0] = -1, tree.drafted[0] = 0, tree.origins[0] = kPending, tree.count = 1, tree.expanded = 0, tree.named_from[0] = 0;
    int32_t node = 0, depth = 0;
    double gain = 1, least = 0;  // expected gain of a node: the probability that it is accepted
    Place place = tree.text ? place_of(*tree.text) : Place{0, 0};
    while (tree.count <= tree.budget) {
      if (tree.least_gains) {
        const int32_t nodes = tree.count - 1;
        least = std::max(least, nodes < tree.least_count ? tree.least_gains[nodes] : INFINITY);
      }
      if (depth < tree.max_depth && (!node || !is_ending(tree.tokens[node]))) offer_all(node, depth, gain, least, place);
      tree.named_from[++tree.expanded] = used;
      if (offers.empty()) break;
      const Offer best = offers.top();
      offers.pop();
      node = tree.count, gain = best.gain, depth = best.depth;
      if (gain < least) break;
      tree.tokens[node] = best.token, tree.parents[node] = best.parent, tree.drafted[node] = best.drafted;
      tree.origins[node] = origin(best.named);
      tree.gains[node - 1] = gain, ++tree.count;
      place = tree.text ? step(*tree.text, best.place, int32_t(best.token)) : Place{0, 0};
    }
  }
};

// The tokens that the target chose below accepted nodes: one step of Adagrad for each on its log-loss
// (trees/union/acceptance.py).
struct Learning {
  double* weights;
  double* squares;
  const int64_t* named_from;
  const int64_t* named;
  const uint8_t* features;
  const int64_t* nodes;  // accepted ones
  const int64_t* said;   // the token that the target chose after each
  double rate;
  int32_t count, size;  // nodes, and weights
};

static inline void learn(const Learning& one) {
  std::vector<double> slopes(one.size), odds;
  std::vector<int32_t> touched;
  for (int index = 0; index < one.count; ++index) {
    const int64_t from = one.named_from[one.nodes[index]], to = one.named_from[one.nodes[index] + 1];
    double total = 0;
    odds.clear(), touched.clear();
    for (int64_t at = from; at < to; ++at) {
      odds.push_back(odds_of(one.weights, one.features + at * kSources));
      total += odds.back();
    }
    total += 1;
    for (int64_t at = from; at < to; ++at) {
      const double miss = odds[at - from] / total - (one.named[at] == one.said[index]);
      for (int source = -1; source < kSources; ++source) {
        const int32_t feature = source < 0 ? 0 : one.features[at * kSources + source];
        if (std::find(touched.begin(), touched.end(), feature) == touched.end()) touched.push_back(feature);
        slopes[feature] += miss;
      }
    }
    for (int32_t feature : touched) {
      const double slope = slopes[feature];
      one.squares[feature] += slope * slope;
      one.weights[feature] -= one.rate * slope / std::sqrt(one.squares[feature]);
      slopes[feature] = 0;
    }
  }
}
