// Keyed draws over a vocabulary: exact noise is computed only where it may decide.
// Python reference: outpace.sampling.verification.draw_keyed.
#pragma once
#include "topk.h"

struct Drawn {
  const void* logits;        // [width]
  const int64_t* top_ids;    // whose logits are `top_logits` instead
  const float* top_logits;
  double temperature;
  int32_t key[2];
  int32_t width, top_count, is_bfloat16;
  int64_t token;  // the result
};

static inline float logit_at(const Drawn& one, int32_t token) {
  return one.is_bfloat16 ? as_float(((const uint16_t*)one.logits)[token]) : ((const float*)one.logits)[token];
}

// The logits from a token on.
static inline Lanes logits_from(const Drawn& one, int32_t token) {
  if (!one.is_bfloat16) return load((const float*)one.logits + token);
  typedef uint16_t HalfLanes __attribute__((vector_size(2 * kLanes)));
  const HalfLanes halves = bits_at<HalfLanes>((const uint16_t*)one.logits + token);
  return (Lanes)(__builtin_convertvector(halves, BitLanes) << 16);
}

// argmax(logits / temperature + noise), the first of equals.
static inline void draw(Drawn& one) {
  double best = -INFINITY;
  one.token = 0;
  const auto weigh = [&](int64_t token, double logit) {
    const double score = logit / one.temperature + gumbel(one.key, token);
    if (score > best || (score == best && token < one.token)) best = score, one.token = token;
  };
  for (int index = 0; index < one.top_count; ++index) weigh(one.top_ids[index], one.top_logits[index]);
  const auto weigh_other = [&](int32_t token) {
    const int64_t* end = one.top_ids + one.top_count;
    if (std::find(one.top_ids, end, int64_t(token)) == end) weigh(token, logit_at(one, token));
  };
  const float scale = float(1 / one.temperature);
  BitLanes ids;
  for (int lane = 0; lane < kLanes; ++lane) ids[lane] = uint32_t(lane);
  int32_t token = 0;
  for (; token + kLanes <= one.width; token += kLanes, ids = ids + uint32_t(kLanes)) {
    const Lanes scaled = logits_from(one, token) * scale;
    // The noise -log(-log(1 - u)) is at most -log u. What rounds in float32 on the way is far less than what is added.
    const Lanes most = scaled - logarithm(uniform_of(one.key, ids)) + (1e-5f * larger(scaled, -scaled) + 1e-4f);
    if (!any_ahead(most, float(best))) continue;
    for (int lane = 0; lane < kLanes; ++lane)
      if (most[lane] > best) weigh_other(token + lane);
  }
  for (; token < one.width; ++token) weigh_other(token);
}
