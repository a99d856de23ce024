// Keyed draws over a vocabulary: exact noise is computed only where it may decide.
// Python reference: outpace.sampling.draw.draw_keyed.
#pragma once
#include "noise.h"

struct Drawn {
  const void* logits;        // [width]
  const int64_t* top_ids;    // whose logits are `top_logits` instead
  const float* top_logits;
  double temperature;
  int32_t key[2];
  int32_t width, top_count, is_bfloat16;
  int64_t token;  // the result
};

constexpr int kNoiseBits = 10;

// The largest noise of hashes with the same first bits: small hashes have large noise, and the smallest no bound.
struct NoiseBounds {
  float most[1 << kNoiseBits];
  NoiseBounds() {
    most[0] = INFINITY;
    for (int first = 1; first < 1 << kNoiseBits; ++first) {
      const double value = (double(uint32_t(first) << (32 - kNoiseBits)) + 0.5) * 0x1p-32;
      most[first] = std::nextafter(float(-std::log(-std::log1p(-value))), INFINITY);
    }
  }
};

// argmax(logits / temperature + noise), the first of equals.
static inline void draw(Drawn& one) {
  static const NoiseBounds bounds;
  double best = -INFINITY;
  one.token = 0;
  const auto weigh = [&](int64_t token, double logit) {
    const double score = logit / one.temperature + gumbel(one.key, token);
    if (score > best || (score == best && token < one.token)) best = score, one.token = token;
  };
  for (int index = 0; index < one.top_count; ++index) weigh(one.top_ids[index], one.top_logits[index]);
  const float scale = float(1 / one.temperature);
  for (int32_t token = 0; token < one.width; ++token) {
    const float logit = one.is_bfloat16 ? as_float(((const uint16_t*)one.logits)[token]) : ((const float*)one.logits)[token];
    const float scaled = logit * scale, most = bounds.most[noise_word(one.key, token) >> (32 - kNoiseBits)];
    // What rounds in float32 on the way is far less than this.
    if (!(double(scaled + most) + 1e-5 * std::abs(scaled) + 1e-4 > best)) continue;
    const int64_t* end = one.top_ids + one.top_count;
    if (std::find(one.top_ids, end, int64_t(token)) == end) weigh(token, logit);
  }
}
