// Weights into the block formats of GGUF files (formats.h), by search and without data to calibrate with.
// Python reference: gguf.quants.dequantize of what it makes, as outpace.kernels.quantize describes.
//
// A part is the weights that share a scale. Sixteen parts are searched together, one in each lane. For every part the
// search tries several ranges of codes, fits the scale and the minimum of least squared error to the codes of each, and
// keeps the best. For every block of 256 it then chooses the 6-bit or 8-bit scales and their common factors: it tries
// neighbours of the rounded scales, and fits the factors to the codes again. Errors are weighted by a weight's square
// and its part's mean square: large weights are clipped less, which improved perplexity.
#pragma once
#include "formats.h"

constexpr int kSearched = 16;  // parts

static inline void put_half(uint8_t* to, float number) {
  const uint16_t half = to_half(number);
  to[0] = uint8_t(half), to[1] = uint8_t(half >> 8);
}

static inline float halved(float number) { return from_half(to_half(number)); }

static inline Lanes whole(Lanes x, float least, float most) {
  return smaller(larger(x, all(least)), all(most)) + 12582912.0f - 12582912.0f;
}

// Sixteen parts of `Size` weights, to be scale * code + low with codes from Least to Most; low is 0 unless HasLow.
template <int Size, int Least, int Most, bool HasLow>
struct Searched {
  alignas(64) float x[Size][kSearched], w[Size][kSearched];
  alignas(64) float scale[kSearched], low[kSearched];

  struct Sums { Lanes w, x, q, qq, qx; };  // weighted
  struct Fit { Lanes scale, low, error; };

  void fill(const float* row, int parts) {
    for (int part = 0; part < kSearched; ++part) {
      const float* own = row + part * Size;
      float square = 0;
      for (int at = 0; at < Size; ++at) x[at][part] = part < parts ? own[at] : 0, square += x[at][part] * x[at][part];
      for (int at = 0; at < Size; ++at) w[at][part] = x[at][part] * x[at][part] + square / Size;
    }
  }

  Sums sums(int lane, Lanes inverse, Lanes start) const {
    Sums to = {};
    for (int at = 0; at < Size; ++at) {
      const Lanes own = load(x[at] + lane), weight = load(w[at] + lane);
      const Lanes code = whole((own - start) * inverse, Least, Most), weighted = weight * code;
      if constexpr (HasLow) to.w += weight, to.x = fma(weight, own, to.x), to.q += weighted;
      to.qq = fma(weighted, code, to.qq), to.qx = fma(weighted, own, to.qx);
    }
    return to;
  }

  // Scale and minimum of least error for the codes that follow from a range, and the error of these codes, up to a
  // constant that is equal for all ranges.
  Fit fit(int lane, Lanes inverse, Lanes start) const {
    const Sums s = sums(lane, inverse, start);
    const Lanes zero = {}, alone = s.qq > zero ? s.qx / s.qq : zero;
    if constexpr (!HasLow) return {alone, zero, -alone * s.qx};
    const Lanes determinant = s.w * s.qq - s.q * s.q, ratio = (s.w * s.qx - s.x * s.q) / determinant;
    const Lanes below = (s.x - ratio * s.q) / s.w;
    const IntLanes both = (determinant > zero) & (below <= zero) & (ratio > zero);
    const Lanes level = s.qq > zero ? zero : smaller(s.x / s.w, zero);  // of weights that are all the same
    const Lanes scale = both ? ratio : larger(alone, zero), low = both ? below : level;
    return {scale, low, -scale * s.qx - low * s.x};
  }

  // The error of a scale and a minimum, each weight with its nearest code.
  Lanes error(int lane, Lanes scales, Lanes lows) const {
    const Lanes zero = {}, inverse = scales != zero ? 1.0f / scales : zero;
    Lanes total = {};
    for (int at = 0; at < Size; ++at) {
      const Lanes away = load(x[at] + lane) - lows;
      const Lanes off = away - scales * whole(away * inverse, Least, Most);
      total = fma(load(w[at] + lane) * off, off, total);
    }
    return total;
  }

  void search() {
    for (int lane = 0; lane < kSearched; lane += kLanes) {
      Fit best = {{}, {}, all(INFINITY)};
      const auto attempt = [&](Lanes inverse, Lanes start) {
        const Fit found = fit(lane, inverse, start);
        const IntLanes better = found.error < best.error;
        best = {better ? found.scale : best.scale, better ? found.low : best.low, better ? found.error : best.error};
      };
      attempt_ranges(lane, attempt);
      const Lanes zero = {};
      for (int again = 0; again < 3; ++again) attempt(best.scale != zero ? 1.0f / best.scale : zero, best.low);
      store(scale + lane, best.scale), store(low + lane, best.low);
    }
  }

  template <class Attempt>
  void attempt_ranges(int lane, Attempt attempt) const {
    Lanes lowest = {}, highest = {};
    const Lanes zero = {};
    for (int at = 0; at < Size; ++at) lowest = smaller(lowest, load(x[at] + lane)), highest = larger(highest, load(x[at] + lane));
    if constexpr (HasLow) {
      const Lanes range = highest - lowest;
      for (const float below : {-0.04f, -0.01f, 0.02f, 0.05f, 0.08f, 0.11f, 0.15f, 0.2f})
        for (const float above : {-0.04f, -0.01f, 0.02f, 0.05f, 0.08f, 0.11f, 0.15f, 0.2f})
          attempt(range > zero ? float(Most) / (range * (1 - below - above)) : zero, lowest + range * below);
    } else {  // the largest magnitude is at one end of the codes or the other
      const Lanes peak = highest > -lowest ? highest : lowest;
      for (const float end : {float(Least), float(Most)})
        for (const float wider : {0.97f, 1.0f, 1.03f, 1.06f, 1.1f, 1.14f, 1.18f, 1.22f})
          attempt(peak != zero ? end * wider / peak : zero, zero);
    }
  }

  void codes(int part, float with, float from, uint8_t* to) const {
    const float inverse = with != 0 ? 1.0f / with : 0;
    for (int at = 0; at < Size; ++at) {
      const float code = std::min(std::max((x[at][part] - from) * inverse, float(Least)), float(Most));
      to[at] = uint8_t(int(code + 12582912.0f - 12582912.0f) - Least);
    }
  }
};

// The scales of parts as small integers times a factor of each block, and their minima times another one.
template <class S, int Parts, int LeastScale, int MostScale, bool HasLow>
struct Joined {
  static constexpr int blocks = kSearched / Parts;
  const S& of;
  alignas(64) float scales[kSearched], minima[kSearched] = {};
  alignas(64) float units[kSearched], least[kSearched] = {};  // the same in all parts of a block
  alignas(64) float errors[kSearched];

  explicit Joined(const S& of) : of(of) {}

  void start(float most) {
    for (int block = 0; block < blocks; ++block) {
      float peak = 0, lowest = 0;
      for (int part = block * Parts; part < (block + 1) * Parts; ++part) {
        if (std::fabs(of.scale[part]) > std::fabs(peak)) peak = of.scale[part];
        lowest = std::min(lowest, of.low[part]);
      }
      set_units(block, LeastScale < 0 ? peak / -most : peak / most, -lowest / most);
    }
    for (int part = 0; part < kSearched; ++part) {
      scales[part] = nearest(units[part] != 0 ? of.scale[part] / units[part] : 0, LeastScale);
      minima[part] = nearest(least[part] != 0 ? -of.low[part] / least[part] : 0, 0);
    }
  }

  void set_units(int block, float unit, float minimum) {
    for (int part = block * Parts; part < (block + 1) * Parts; ++part)
      units[part] = halved(unit), least[part] = HasLow ? halved(minimum) : 0;
  }

  static float nearest(float x, float lowest) { return std::min(std::max(std::nearbyint(x), lowest), float(MostScale)); }

  // Each part's best neighbours of its integers.
  void try_neighbours() {
    for (int lane = 0; lane < kSearched; lane += kLanes) {
      const Lanes scale = load(scales + lane), minimum = load(minima + lane), unit = load(units + lane), other = load(least + lane);
      Lanes best = all(INFINITY), best_scale = scale, best_minimum = minimum;
      for (const float up : {0.0f, -1.0f, 1.0f})
        for (const float below : {0.0f, -1.0f, 1.0f}) {
          if (!HasLow && below != 0) continue;
          const Lanes s = smaller(larger(scale + up, all(LeastScale)), all(MostScale));
          const Lanes m = HasLow ? smaller(larger(minimum + below, Lanes{}), all(MostScale)) : minimum;
          const Lanes wrong = of.error(lane, unit * s, -(other * m));
          const IntLanes better = wrong < best;
          best = better ? wrong : best, best_scale = better ? s : best_scale, best_minimum = better ? m : best_minimum;
        }
      store(scales + lane, best_scale), store(minima + lane, best_minimum), store(errors + lane, best);
    }
  }

  // The factors of least error for the codes that the present ones lead to.
  void fit_units() {
    alignas(64) float w[kSearched], x[kSearched], q[kSearched], qq[kSearched], qx[kSearched];
    for (int lane = 0; lane < kSearched; lane += kLanes) {
      const Lanes scale = load(scales + lane) * load(units + lane), zero = {};
      const auto s = of.sums(lane, scale != zero ? 1.0f / scale : zero, -(load(least + lane) * load(minima + lane)));
      store(w + lane, s.w), store(x + lane, s.x), store(q + lane, s.q), store(qq + lane, s.qq), store(qx + lane, s.qx);
    }
    for (int block = 0; block < blocks; ++block) {
      double a = 0, b = 0, c = 0, p = 0, r = 0;
      for (int part = block * Parts; part < (block + 1) * Parts; ++part) {
        const double s = scales[part], m = minima[part];
        a += s * s * qq[part], b += s * m * q[part], c += m * m * w[part], p += s * qx[part], r += m * x[part];
      }
      const double determinant = a * c - b * b;
      if (HasLow && determinant > 1e-9 * a * c) set_units(block, float((p * c - b * r) / determinant), float((b * p - a * r) / determinant));
      else if (a > 0) set_units(block, float((p + b * least[block * Parts]) / a), least[block * Parts]);
    }
  }

  double error_of(int block) const {
    double total = 0;
    for (int part = block * Parts; part < (block + 1) * Parts; ++part) total += errors[part];
    return total;
  }

  void take(const Joined& from, int block) {
    const size_t at = block * Parts, bytes = sizeof(float) * Parts;
    std::memcpy(scales + at, from.scales + at, bytes), std::memcpy(minima + at, from.minima + at, bytes);
    std::memcpy(units + at, from.units + at, bytes), std::memcpy(least + at, from.least + at, bytes);
    std::memcpy(errors + at, from.errors + at, bytes);
  }

  void search() {
    std::fill(errors, errors + kSearched, INFINITY);
    Joined attempt(of);
    for (const float most : {1.0f, 0.96f}) {
      attempt.start(most * (LeastScale < 0 ? -LeastScale : MostScale));
      for (int again = 0; again < 3; ++again) {
        if (again) attempt.fit_units();
        attempt.try_neighbours();
        for (int block = 0; block < blocks; ++block)
          if (attempt.error_of(block) < error_of(block)) take(attempt, block);
      }
    }
  }
};

static inline void pack_scales(const float* scales, const float* minima, uint8_t* to) {
  for (int part = 0; part < 8; ++part) {
    const uint8_t scale = uint8_t(scales[part]), minimum = uint8_t(minima[part]);
    if (part < 4) to[part] = scale, to[part + 4] = minimum;
    else to[part + 4] = uint8_t((scale & 15) | minimum << 4), to[part - 4] |= scale >> 4 << 6, to[part] |= minimum >> 4 << 6;
  }
}

static inline void quantize_q4_k(const float* row, int inputs, uint8_t* to) {
  typedef Searched<32, 0, 15, true> S;
  S parts;
  for (int first = 0; first < inputs; first += 32 * kSearched) {
    const int count = std::min(kSearched, (inputs - first) / 32);
    parts.fill(row + first, count);
    parts.search();
    Joined<S, 8, 0, 63, true> joined(parts);
    joined.search();
    for (int block = 0; block < count / 8; ++block, to += 144) {
      const int at = 8 * block;
      put_half(to, joined.units[at]), put_half(to + 2, joined.least[at]);
      pack_scales(joined.scales + at, joined.minima + at, to + 4);
      uint8_t codes[256];
      for (int part = 0; part < 8; ++part)
        parts.codes(at + part, joined.units[at] * joined.scales[at + part], -(joined.least[at] * joined.minima[at + part]), codes + 32 * part);
      for (int byte = 0; byte < 128; ++byte) to[16 + byte] = uint8_t(codes[byte / 32 * 64 + byte % 32] | codes[byte / 32 * 64 + 32 + byte % 32] << 4);
    }
  }
}

static inline void quantize_q6_k(const float* row, int inputs, uint8_t* to) {
  typedef Searched<16, -32, 31, false> S;
  S parts;
  for (int first = 0; first < inputs; first += 256, to += 210) {
    parts.fill(row + first, kSearched);
    parts.search();
    Joined<S, 16, -128, 127, false> joined(parts);
    joined.search();
    uint8_t codes[256];
    for (int part = 0; part < 16; ++part) {
      parts.codes(part, joined.units[0] * joined.scales[part], 0, codes + 16 * part);
      to[192 + part] = uint8_t(int(joined.scales[part]));
    }
    for (int half = 0; half < 2; ++half)
      for (int at = 0; at < 32; ++at) {
        const uint8_t* own = codes + 128 * half + at;
        to[64 * half + at] = uint8_t((own[0] & 15) | (own[64] & 15) << 4);
        to[64 * half + 32 + at] = uint8_t((own[32] & 15) | (own[96] & 15) << 4);
        to[128 + 32 * half + at] = uint8_t(own[0] >> 4 | own[32] >> 4 << 2 | own[64] >> 4 << 4 | own[96] >> 4 << 6);
      }
    put_half(to + 208, joined.units[0]);
  }
}

template <int32_t Id>
static inline void quantize_simple(const float* row, int inputs, uint8_t* to) {
  constexpr int offset = Form<Id>::offset;
  Searched<32, -offset, offset - 1, false> parts;
  for (int first = 0; first < inputs; first += 32 * kSearched) {
    const int count = std::min(kSearched, (inputs - first) / 32);
    parts.fill(row + first, count);
    parts.search();
    for (int part = 0; part < count; ++part, to += Form<Id>::file_bytes) {
      uint8_t codes[32];
      put_half(to, parts.scale[part]);
      parts.codes(part, half_at(to), 0, codes);
      if constexpr (Id == kQ8_0) {
        for (int at = 0; at < 32; ++at) to[2 + at] = codes[at] ^ 0x80;
      } else {
        static_assert(Id == kQ5_0);
        uint32_t fifth = 0;
        for (int at = 0; at < 32; ++at) fifth |= uint32_t(codes[at] >> 4) << at;
        put_four(to + 2, fifth);
        for (int at = 0; at < 16; ++at) to[6 + at] = uint8_t((codes[at] & 15) | (codes[16 + at] & 15) << 4);
      }
    }
  }
}

// Weights above this count as infinite: Q5_0 ends here, and squares of errors would be infinite a little later.
constexpr float kMostWeight = 1e6f;

// A row in one of the formats Q4_K, Q6_K, Q5_0 and Q8_0; with factors that are not a number where a weight is not finite.
static inline void quantize_row(int32_t format, const float* row, int inputs, uint8_t* to) {
  for (int at = 0; at < inputs; ++at)
    if (!(std::fabs(row[at]) <= kMostWeight)) return void(std::memset(to, 0xff, file_row_bytes(format, inputs)));
  switch (format) {
    case kQ4_K: return quantize_q4_k(row, inputs, to);
    case kQ6_K: return quantize_q6_k(row, inputs, to);
    case kQ5_0: return quantize_simple<kQ5_0>(row, inputs, to);
    case kQ8_0: return quantize_simple<kQ8_0>(row, inputs, to);
  }
}
