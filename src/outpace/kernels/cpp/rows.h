// One row between two products: norms, rotations, activations, and conversion to the operand of a product.
// Python reference: outpace.models.plain_decoder (RMSNorm, PlainMLP), outpace.drafters.layers (Rotary).
#pragma once
#include "formats.h"
#include "lanes.h"
#include "neon.h"

// The arithmetic of a product; matrices in a format of GGUF files have kinds of their own (formats.h).
enum Kind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kWidened = 3, kHalves = 4 };

// Numbers of a row that is rounded to bfloat16. Where pairs are slow they are multiplied in float32.
#if OUTPACE_BFDOT
typedef uint16_t RoundedRow;
constexpr bool kRowsAreHalves = true;
#else
typedef float RoundedRow;
constexpr bool kRowsAreHalves = false;
#endif

// Numbers `first` to `last` of row / rms(row) * weight.
static inline void rms_norm(const float* row, const float* weight, float eps, int width, int first, int last, float* out) {
  const float scale = 1.0f / std::sqrt(dot(row, row, width) / float(width) + eps);
  for (int at = first; at < last; ++at) *out++ = row[at] * scale * weight[at];
}

static inline void rms_norm(const float* row, const float* weight, float eps, int width, float* out) {
  rms_norm(row, weight, eps, width, 0, width, out);
}

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

static inline Lanes activate(Lanes x, int32_t activation) {
  if (activation == kSilu) return x / (1.0f + exponential(smaller(-x, all(87.0f))));
  // x * sigmoid(2 t) is x / 2 * (1 + tanh(t))
  const Lanes t = 1.5957691216f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(smaller(-t, all(87.0f))));
}

// out = activation(gate) * up
static inline void gate(const float* gates, const float* ups, int count, int32_t activation, float* out) {
  int at = 0;
  for (; at + kLanes <= count; at += kLanes) store(out + at, activate(load(gates + at), activation) * load(ups + at));
  if (at < count) {
    float rest[kLanes] = {};
    std::memcpy(rest, gates + at, sizeof(float) * (count - at));
    store(rest, activate(load(rest), activation));
    for (int lane = 0; at < count; ++lane, ++at) out[at] = rest[lane] * ups[at];
  }
}

// Rotate a head's first `width` numbers: halves are pairs, as transformers has them.
static inline void rotate(float* head, const float* cosines, const float* sines, int width) {
  const int half = width / 2;
  for (int at = 0; at < half; ++at) {
    const float low = head[at], high = head[at + half];
    head[at] = low * cosines[at] - high * sines[at];
    head[at + half] = high * cosines[at + half] + low * sines[at + half];
  }
}

// Lanes that stand `Step` apart, added and subtracted: one stage of a Hadamard transform inside a vector.
template <int Step>
static inline Lanes butterfly(Lanes lanes) {
  IntLanes partner;
  Lanes sign;
  for (int lane = 0; lane < kLanes; ++lane) partner[lane] = lane ^ Step, sign[lane] = lane & Step ? -1.0f : 1.0f;
#if defined(__clang__)
  Lanes turned;
  for (int lane = 0; lane < kLanes; ++lane) turned[lane] = lanes[lane ^ Step];
#else
  const Lanes turned = __builtin_shuffle(lanes, partner);
#endif
  return turned + lanes * sign;
}

static inline Lanes butterflies(Lanes lanes) {
  lanes = butterfly<2>(butterfly<1>(lanes));
  if constexpr (kLanes > 4) lanes = butterfly<4>(lanes);
  if constexpr (kLanes > 8) lanes = butterfly<8>(lanes);
  return lanes;
}

// Each block of a row times the orthonormal Hadamard matrix of its size, a power of two: outliers are spread over it.
static inline void hadamard(float* row, int width, int block) {
  const float scale = 1.0f / std::sqrt(float(block));
  for (float* x = row; x < row + width; x += block) {
    int step = 1;
    if (block >= kLanes) {
      for (int at = 0; at < block; at += kLanes) store(x + at, butterflies(load(x + at) * scale));
      for (step = kLanes; step < block; step *= 2)
        for (int pair = 0; pair < block; pair += 2 * step)
          for (int at = pair; at < pair + step; at += kLanes) {
            const Lanes a = load(x + at), b = load(x + at + step);
            store(x + at, a + b), store(x + at + step, a - b);
          }
      continue;
    }
    for (int at = 0; at < block; ++at) x[at] *= scale;
    for (; step < block; step *= 2)
      for (int pair = 0; pair < block; pair += 2 * step)
        for (int at = pair; at < pair + step; ++at) {
          const float a = x[at], b = x[at + step];
          x[at] = a + b, x[at + step] = a - b;
        }
  }
}

// NaN if one of the numbers is: the bits of magnitudes have the order of magnitudes, and those of NaN come last.
static inline float largest_magnitude(const float* row, int width) {
  constexpr int32_t kMagnitude = 0x7fffffff;
  IntLanes most = {};
  int at = 0;
  for (; at + kLanes <= width; at += kLanes) {
    const IntLanes own = (IntLanes)load(row + at) & kMagnitude;
    most = own > most ? own : most;
  }
  int32_t found = largest(most);
  for (; at < width; ++at) found = std::max(found, bits_at<int32_t>(row + at) & kMagnitude);
  return bits_at<float>(&found);
}

// A product's left side: rows of one of the kinds, each `stride` numbers, zeros after its end.
struct Operand {
  void* rows;
  float* scales;  // int8: of each row; formats of files: of each 32 numbers
  float* less;    // formats of files: -scale * sum of each 32 integers
  int32_t* sums;  // int8: of each row's integers; formats of files: of each 16, in pairs where kPairs says so
  int32_t stride, count;
};

constexpr int kPart = 32;  // numbers of a row that share a scale, in products with formats of files

// x86 without VNNI multiplies bytes into 16-bit lanes, of which two serve an output: numbers 0 and 1 of each four, and 2
// and 3. Then the sum of 16 is two sums of 8 in 16 bits each, in the order of lanes.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && (defined(__AVX512BW__) || !defined(__AVXVNNI__))
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// Such a product takes rows in tiles, of nearly equal height and at most as many as registers hold sums for.
#if defined(__AVX512VNNI__) || (defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8))
constexpr int kMostTileRows = 8;
#else
constexpr int kMostTileRows = 4;
#endif
constexpr bool kAlternate = kWords == 1;  // a tile's rows, word by word: one address finds all. NEON reads four words

// Rows of each tile but the last.
static inline int tile_height(int rows) {
  const int tiles = (rows + kMostTileRows - 1) / kMostTileRows;
  return (rows + tiles - 1) / tiles;
}

// Where a row's numbers are, so many together: from `first` on, `step` from one such group to the next.
struct RowPlace {
  size_t first;
  int step;
};

static inline RowPlace place_of_row(int row, int rows, int numbers, int together) {
  if (!kAlternate) return {size_t(row) * numbers, together};
  const int height = tile_height(rows), start = row / height * height;
  return {size_t(start) * numbers + (row - start) * together, std::min(height, rows - start) * together};
}

static inline int padded(int width) { return (width + 63) / 64 * 64; }

// Rows start at different offsets in a page: with equal offsets they would evict each other from the nearest cache.
static inline int operand_stride(int width) { return padded(width) + 64; }

// Round parts `first` to `last` of a row to integers, to the nearest; the largest of each 32 becomes 127 or -127.
static inline void into_parts(const float* from, int first, int last, int parts, const Operand& to, int index) {
  const RowPlace words = place_of_row(index, to.count, to.stride, 4), each = place_of_row(index, to.count, parts, 1);
  const RowPlace halves = place_of_row(index, to.count, 2 * parts, 1);
  int8_t* numbers = (int8_t*)to.rows + words.first;
  for (int part = first; part < last; ++part, from += kPart) {
    const float most = largest_magnitude(from, kPart);
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    int32_t total = 0;
    for (int half = 0; half < 2; ++half) {
      IntLanes own = {};
      for (int at = 0; at < 16; at += kLanes) {
        const int place = half * 16 + at;
        const IntLanes whole = rounded(load(from + place) * inverse);
        int8_t bytes[kLanes];
        store_bytes(bytes, whole);
        for (int word = 0; word < kLanes / 4; ++word)
          std::memcpy(numbers + ((part * kPart + place) / 4 + word) * words.step, bytes + 4 * word, 4);
        own += whole;
      }
      const int32_t found = sum(own);
      int32_t& stored = to.sums[halves.first + (2 * part + half) * halves.step];
      if constexpr (kPairs) {
        IntLanes first = own;
        for (int lane = 0; lane < kLanes; ++lane)
          if (lane % 4 > 1) first[lane] = 0;
        const int32_t low = sum(first);
        stored = int32_t(uint32_t(found - low) << 16 | uint16_t(low));
      } else {
        stored = found;
      }
      total += found;
    }
    const float scale = most / 127.0f;
    to.scales[each.first + part * each.step] = scale;
    to.less[each.first + part * each.step] = -scale * float(total);
  }
}

// Round a row to integers, to the nearest; the largest becomes 127 or -127. Returns what they are multiples of, NaN if
// one of them is.
// Python reference: outpace.lib.int8.rounded_rows.
static inline float into_bytes(const float* row, int width, int8_t* out, int32_t* total) {
  const float most = largest_magnitude(row, width);
  const float unit = most == 0 ? 1.0f : most / 127.0f, inverse = 1.0f / unit;
  IntLanes sums = {};
  int at = 0;
  for (; at + kLanes <= width; at += kLanes) {
    const IntLanes whole = rounded(load(row + at) * inverse);
    store_bytes(out + at, whole);
    sums += whole;
  }
  *total = sum(sums);
  for (; at < width; ++at) {
    const int32_t whole = int32_t(__builtin_rintf(row[at] * inverse));
    out[at] = int8_t(whole);
    *total += whole;
  }
  return unit;
}

// Make row `index` of an operand of `row`, which is changed where it has to be rotated. Of all kinds but formats of files.
static inline void prepare(float* row, int width, int32_t kind, int32_t block, const Operand& to, int index) {
  const size_t start = size_t(index) * to.stride;
  if (kind == kFloat32 || kind == kWidened || kind == kHalves) {
    float* out = (float*)to.rows + start;
    std::memcpy(out, row, sizeof(float) * width);
    for (int at = width; at < to.stride; ++at) out[at] = 0;
  } else if (kind == kBfloat16) {
    RoundedRow* out = (RoundedRow*)to.rows + start;
    for (int at = 0; at < width; ++at) {
      const uint16_t half = to_bfloat16(row[at]);
      out[at] = kRowsAreHalves ? RoundedRow(half) : RoundedRow(as_float(half));
    }
    for (int at = width; at < to.stride; ++at) out[at] = 0;
  } else {
    if (block > 1) hadamard(row, width, block);
    int8_t* out = (int8_t*)to.rows + start;
    to.scales[index] = into_bytes(row, width, out, &to.sums[index]);
    for (int at = width; at < to.stride; ++at) out[at] = 0;
  }
}
