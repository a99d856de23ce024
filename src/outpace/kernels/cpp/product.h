// Products of rows with a frozen weight, stored in panels of 32 outputs.
// Python reference: torch.nn.functional.linear.
//
// Each number of a result is one sum over the inputs in their order: results are batch-invariant.
#pragma once
#include "block_product.h"
#include "neon.h"
#include "pool.h"
#include "rows.h"
#include <array>

constexpr int kPanel = 32;
constexpr int kVectors = kPanel / kLanes;  // of a panel's outputs
#if defined(__AVX512BW__) || defined(__aarch64__)
constexpr int kRowsAtOnce = 8;
#else
constexpr int kRowsAtOnce = 2;
#endif
// Vectors of outputs at a time: of 32 registers of NEON 16 keep sums.
static constexpr int vectors_at_once(int rows) { return kLanes > 4 || rows <= 2 ? kVectors : rows <= 4 ? 4 : 2; }

// How many inputs of one output lie side by side in a panel.
static inline int inputs_together(int32_t kind) { return kind == kFloat32 || kind == kHalves ? 1 : kind == kInt8 ? 4 : 2; }

struct Matrix {
  const void* panels;   // [outputs / 32][inputs / together][32][together]; int8 with 128 added
  const float* scales;  // int8: [outputs in whole panels], the scale of each output
  const float* bias;    // [outputs in whole panels] or null
  const Matrix* next;   // a matrix of the same inputs whose outputs follow, in another format of files; or null
  int32_t outputs, inputs, kind;
  int32_t block;        // int8: of the Hadamard rotation that its inputs were given
};

static inline size_t panel_bytes(const Matrix& m) {
  if (is_from_file(m.kind)) return block_panel_bytes(m.kind - kFromFile, m.inputs);
  const size_t width = m.kind == kFloat32 ? 4 : m.kind == kInt8 ? 1 : 2;
  return size_t(padded(m.inputs)) * kPanel * width;
}

constexpr int kAhead = 8192;

// While rows are computed, weights are loaded from memory: they are prefetched two pages ahead, which hardware does not
// do.
static inline void fetch_ahead(const void* panel) {
  __builtin_prefetch((const char*)panel + kAhead);
  __builtin_prefetch((const char*)panel + kAhead + 64);
}

// Weights as they lie in a panel: so many numbers of an output side by side, and vectors of the first or second ones.
struct Floats {
  typedef float Number;
  static constexpr int together = 1;
  template <int Index>
  static Lanes lanes(const float* from) { return load(from); }
};

struct Float16s {
  typedef uint16_t Number;
  static constexpr int together = 1;
  template <int Index>
  static Lanes lanes(const uint16_t* from) { return half_lanes((const uint8_t*)from); }
};

struct Bfloat16s {
  typedef uint16_t Number;
  static constexpr int together = 2;
  template <int Index>
  static Lanes lanes(const uint16_t* from) {
    const BitLanes both = bits_at<BitLanes>(from);
    return (Lanes)(Index ? both & 0xffff0000u : both << 16);
  }
};

// Products in float32, of weights that may be stored in other types.
template <class Weights, int R>
static inline void multiply_floats(const void* panel, const float* const* rows, int inputs, float (*out)[kPanel]) {
  constexpr int V = vectors_at_once(R), together = Weights::together, step = std::max(kWords, together);
  for (int v = 0; v < kVectors; v += V) {
    Lanes sums[R][V] = {};
    const auto* own = (const typename Weights::Number*)panel + v * kLanes * together;
    for (int k = 0; k < inputs; k += step, own += step * kPanel) {
      fetch_ahead(own);
      for (int each = 0; each < V; ++each)
        for_each<step>([&](auto index) INLINE {
          const auto* from = own + index / together * together * kPanel + each * kLanes * together;
          const Lanes weight = Weights::template lanes<index % together>(from);
          for (int r = 0; r < R; ++r)
            sums[r][each] = add_float<index % kWords>(sums[r][each], weight, load_words(rows[r] + k + index / kWords * kWords));
        });
    }
    for (int r = 0; r < R; ++r)
      for (int each = 0; each < V; ++each) store(out[r] + (v + each) * kLanes, sums[r][each]);
  }
}

#if !defined(__aarch64__)
// What neon.h has for ARM: a vector of words of 32 bits times one word.
struct UnsignedBytes {
  typedef IntLanes Sum;
  static constexpr int offset = kPairs ? 0 : 128;
  static Sum add(Sum sum, CodeLanes weights, Words word) { return add_products(sum, weights, int32_t(word)); }
};

#if OUTPACE_BFDOT
struct BfloatPairs {
  typedef Lanes Sum;
  static Sum add(Sum sum, CodeLanes weights, Words word) {
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int32_t(word)));
  }
};
#endif

// A panel of [words][32] times R rows: out [R][32].
template <class Product, int R>
static inline void multiply_words(const uint8_t* panel, const void* const* rows, int words, void* out) {
  typename Product::Sum sums[R][kVectors] = {};
  for (int word = 0; word < words; ++word, panel += 4 * kPanel) {
    CodeLanes weights[kVectors];
UNROLL
    for (int v = 0; v < kVectors; ++v) weights[v] = load_codes(panel + v * sizeof(CodeLanes));
    fetch_ahead(panel);
UNROLL  // at once, or compilers keep the sums in memory
    for (int r = 0; r < R; ++r)
UNROLL
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = Product::add(sums[r][v], weights[v], load_words((const uint8_t*)rows[r] + 4 * size_t(word)));
  }
UNROLL
  for (int r = 0; r < R; ++r)
UNROLL
    for (int v = 0; v < kVectors; ++v) std::memcpy((char*)out + 128 * r + sizeof(Lanes) * v, &sums[r][v], sizeof sums[r][v]);
}
#endif

// Results of a panel, with the bias: stored, or added to what is there.
static inline void store_panel(const Matrix& m, int panel, const float (*out)[kPanel], int rows, bool add, float* to,
                               int stride) {
  const int start = panel * kPanel, count = std::min(kPanel, m.outputs - start);
  for (int r = 0; r < rows; ++r) {
    float* row = to + size_t(r) * stride + start;
    float rest[kPanel] = {};  // of the last panel, which may have fewer outputs
    float* own = count == kPanel ? row : rest;
    if (add && own == rest) std::memcpy(rest, row, sizeof(float) * count);
    for (int at = 0; at < kPanel; at += kLanes) {
      Lanes sums = load(out[r] + at);
      if (m.bias) sums += load(m.bias + start + at);
      if (add) sums += load(own + at);
      store(own + at, sums);
    }
    if (own == rest) std::memcpy(row, rest, sizeof(float) * count);
  }
}

// A panel's outputs at R rows from `first` on: stored, or added to what is there.
template <int R>
static inline void panel_rows(const Matrix& m, const Operand& from, int panel, int first, bool add, float* to,
                              int stride) {
  const char* weights = (const char*)m.panels + panel * panel_bytes(m);
  const int start = panel * kPanel, inputs = padded(m.inputs);
  float out[R][kPanel];
  const auto rows_of = [&](auto number) INLINE {
    std::array<const decltype(number)*, R> rows;
    for (int r = 0; r < R; ++r) rows[r] = (const decltype(number)*)from.rows + size_t(first + r) * from.stride;
    return rows;
  };
  if (m.kind == kFloat32) {
    multiply_floats<Floats, R>(weights, rows_of(float()).data(), inputs, out);
  } else if (m.kind == kBfloat16) {
#if OUTPACE_BFDOT
    multiply_words<BfloatPairs, R>((const uint8_t*)weights, (const void* const*)rows_of(RoundedRow()).data(), inputs / 2, out);
#else
    multiply_floats<Bfloat16s, R>(weights, rows_of(RoundedRow()).data(), inputs, out);
#endif
  } else if (m.kind == kWidened) {
    multiply_floats<Bfloat16s, R>(weights, rows_of(float()).data(), inputs, out);
  } else if (m.kind == kHalves) {
    multiply_floats<Float16s, R>(weights, rows_of(float()).data(), inputs, out);
  } else {
    int32_t whole[R][kPanel];
    multiply_words<UnsignedBytes, R>((const uint8_t*)weights, (const void* const*)rows_of(int8_t()).data(), inputs / 4, whole);
    for (int r = 0; r < R; ++r)
      for (int at = 0; at < kPanel; at += kLanes) {
        const IntLanes sums = bits_at<IntLanes>(whole[r] + at);
        const Lanes unit = from.scales[first + r] * load(m.scales + start + at);
        store(out[r] + at, __builtin_convertvector(sums - UnsignedBytes::offset * from.sums[first + r], Lanes) * unit);
      }
  }
  store_panel(m, panel, out, R, add, to + size_t(first) * stride, stride);
}

template <int R>
static inline void panel_rest(const Matrix& m, const Operand& from, int panel, int first, int count, bool add,
                              float* to, int stride) {
  if (count == R) panel_rows<R>(m, from, panel, first, add, to, stride);
  else if constexpr (R > 1) panel_rest<R - 1>(m, from, panel, first, count, add, to, stride);
}

constexpr int kMostBlockRows = 64;  // whose results fit the nearest cache

// As `panel_rows` for all rows, of a matrix in a format of files.
static inline void block_panel_rows(const Matrix& m, const Operand& from, int panel, bool add, float* to, int stride) {
  const uint8_t* weights = (const uint8_t*)m.panels + panel * panel_bytes(m);
  const int height = tile_height(from.count), most = kMostBlockRows / height * height;
  for (int first = 0; first < from.count; first += most) {
    const int count = std::min(most, from.count - first);
    float out[kMostBlockRows][kPanel];
    multiply_block_panel(m.kind - kFromFile, weights, Parts(from, m.inputs).from(first), count, height, out);
    store_panel(m, panel, out, count, add, to + size_t(first) * stride, stride);
  }
}

constexpr size_t kBytesTogether = 1 << 18;  // of neighbouring panels that a thread takes at once: memory is read in order

static inline int panels_of(const Matrix& m) { return (m.outputs + kPanel - 1) / kPanel; }

// Outputs of a matrix and of those that follow it.
static inline int outputs_of(const Matrix& m) { return m.outputs + (m.next ? outputs_of(*m.next) : 0); }

// to[row] (+)= weight * from[row] + bias for all rows.
static inline void multiply(Team& team, const Matrix& m, const Operand& from, bool add, float* to, int stride) {
  int panels = 0;
  for (const Matrix* each = &m; each; each = each->next) panels += panels_of(*each);
  const int together = std::max(1, std::min(int(kBytesTogether / panel_bytes(m)), panels / (4 * team.size)));
  team.share((panels + together - 1) / together, [&](int piece) {
    for (int index = piece * together; index < std::min(panels, (piece + 1) * together); ++index) {
      const Matrix* own = &m;
      float* place = to;
      int panel = index;
      for (; panel >= panels_of(*own); own = own->next) panel -= panels_of(*own), place += own->outputs;
      if (is_from_file(own->kind)) {
        block_panel_rows(*own, from, panel, add, place, stride);
        continue;
      }
      for (int first = 0; first < from.count; first += kRowsAtOnce)
        panel_rest<kRowsAtOnce>(*own, from, panel, first, std::min(kRowsAtOnce, from.count - first), add, place, stride);
    }
  });
}
