// Suffix automata: where the end of a text occurred before in it.
// Python reference: outpace.trees.retrieval.suffix.TextMatch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

// The automaton of a text that grows: a state stands for all substrings that end at the same places.
struct Automaton {
  struct State {
    int32_t length = 0, end = 0, link = -1;
    std::vector<std::pair<int32_t, int32_t>> edges;  // token and state, ascending
  };
  std::vector<State> states = std::vector<State>(1);
  std::vector<int32_t> ids;
  int32_t last = 0;

  int32_t* edge(int32_t state, int32_t token) {
    auto& edges = states[state].edges;
    auto found = std::lower_bound(edges.begin(), edges.end(), std::make_pair(token, INT32_MIN));
    return found != edges.end() && found->first == token ? &found->second : nullptr;
  }

  void lead(int32_t state, int32_t token, int32_t to) {
    auto& edges = states[state].edges;
    edges.insert(std::lower_bound(edges.begin(), edges.end(), std::make_pair(token, INT32_MIN)), {token, to});
  }

  void extend(int32_t token) {
    ids.push_back(token);
    const int32_t added = int32_t(states.size());
    states.emplace_back();
    states[added].length = states[added].end = int32_t(ids.size());
    int32_t state = last;
    last = added;
    for (; state != -1 && !edge(state, token); state = states[state].link) lead(state, token, added);
    if (state == -1) {
      states[added].link = 0;
      return;
    }
    int32_t known = *edge(state, token);
    if (states[known].length > states[state].length + 1) {
      // Its shorter substrings now end here too and its longer ones do not: the state is split.
      const int32_t longer = known;
      known = int32_t(states.size());
      states.push_back(State(states[longer]));
      states[known].length = states[state].length + 1;
      states[longer].link = known;
      for (; state != -1; state = states[state].link) {
        int32_t* to = edge(state, token);
        if (!to || *to != longer) break;
        *to = known;
      }
    }
    states[added].link = known;
  }
};

// Where a text's continuation stands in it: a state, and how long the match is.
struct Place {
  int32_t state, length;
};

static inline Place place_of(const Automaton& text) {
  const int32_t state = std::max(text.states[text.last].link, 0);
  return {state, text.states[state].length};
}

static inline Place step(Automaton& text, Place at, int32_t token) {
  const int32_t* to;
  while (!(to = text.edge(at.state, token))) {
    at.state = text.states[at.state].link;
    if (at.state == -1) return {0, 0};
    at.length = text.states[at.state].length;
  }
  return {*to, at.length + 1};
}
