// What products with the block formats of GGUF files read: rows in parts of 32 numbers, and codes that are fetched ahead.
#pragma once
#include "codes.h"
#include "rows.h"

// A product's sums stay in registers only if the loops over them are unrolled; for portable code that would be too
// long.
#if defined(__AVX2__) || defined(__aarch64__)
#define UNROLL _Pragma("GCC unroll 8")
#else
#define UNROLL
#endif

// Rows of activations: 8-bit integers, their scales, sums of 16, and -scale * sum of 32. The rows of a tile alternate:
// numbers [inputs / 4][R][4], scales [inputs / 32][R]; or they lie behind each other, [R][stride] and [R][inputs / 32].
struct Parts {
  const int8_t* numbers;
  const float *scales, *less;
  const int32_t* sums;
  int32_t stride, inputs;

  Parts(const Operand& of, int inputs)
      : numbers((const int8_t*)of.rows), scales(of.scales), less(of.less), sums(of.sums), stride(of.stride), inputs(inputs) {}

  // The rows from one on that begins a tile.
  Parts from(int first) const {
    Parts rest = *this;
    const size_t parts = size_t(first) * (inputs / kPart);
    rest.numbers += size_t(first) * stride, rest.scales += parts, rest.less += parts, rest.sums += 2 * parts;
    return rest;
  }

  // A tile's rows of R, so many parts of 32 inputs on.
  template <int R>
  Parts after(int parts) const {
    constexpr int step = kAlternate ? R : 1;
    Parts rest = *this;
    rest.numbers += parts * step * kPart, rest.scales += parts * step, rest.less += parts * step, rest.sums += 2 * parts * step;
    return rest;
  }

  // Of row `r` of a tile of R in the first part: four numbers from input `at` on, the place of its scale, a sum of 16.
  template <int R>
  const int8_t* four(int r, int at) const { return numbers + (kAlternate ? at * R + 4 * r : size_t(r) * stride + at); }
  size_t scale_at(int r) const { return kAlternate ? r : size_t(r) * (inputs / kPart); }
  template <int R>
  int32_t stored_sum(int r, int half) const { return sums[kAlternate ? half * R + r : size_t(r) * (inputs / 16) + half]; }
  template <int R>
  int32_t sum(int r, int half) const {
    const int32_t stored = stored_sum<R>(r, half);
    return kPairs ? (stored >> 16) + int16_t(stored) : stored;
  }
};

// -scale * sum of the integers of a row that share a minimum.
template <class F, int R>
static inline float less_of(const Parts& x, int r, int at) {
  const size_t index = x.scale_at(r);
  if constexpr (F::shared == kPart) return x.less[index];
  return -x.scales[index] * float(x.sum<R>(r, at / 16));
}

// How far ahead weights are fetched into the second cache: memory takes longer than hardware looks ahead.
constexpr int kBytesAhead = 8192;

// Fetch what some groups have of the bytes from `ahead` on of inputs that share a scale. All at once, they would take the
// buffers that other loads wait for.
template <class F>
static inline void fetch_groups(const uint8_t* ahead, int first, int last) {
  constexpr int groups = F::shared / 4, lines = (F::bytes / F::parts + 63) / 64;  // of 64 bytes
UNROLL
  for (int line = lines * first / groups; line < lines * last / groups; ++line) __builtin_prefetch(ahead + 64 * line, 0, 2);
}

// Of which parts of blocks a tile fetches what lies ahead, so that all tiles of a panel take turns.
struct Turn {
  int mask, own;

  Turn(int tile, int tiles) : mask(tiles >= 4 ? 3 : tiles >= 2 ? 1 : 0), own(tile) {}
  bool has(int part) const { return (part & mask) == own; }
};

template <class F, bool Expanded>
static inline CodeLanes codes_of_four(const uint8_t* codes_of, int group, int v) {
  if constexpr (Expanded) return load_codes(codes_of + group * 128 + v * sizeof(CodeLanes));
  else return codes_at<F>(codes_of, group, v);
}

