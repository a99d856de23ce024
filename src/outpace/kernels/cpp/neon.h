// Products of words of 32 bits on ARM: four bytes or two numbers in bfloat16 to a word, by the best instructions that the
// library is compiled for. Weights lie as in panels: a word of each output, then the next word of each.
//
// SDOT multiplies four outputs by one row, SMMLA and BFMMLA two outputs by two rows. Integer sums have no order; BFMMLA
// adds the two words of a row one after the other, as two BFDOT do. So rows have the same bits in any company.
#pragma once
#include "lanes.h"
#if defined(__aarch64__)

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kMultipliesMatrices = true;
#else
constexpr bool kMultipliesMatrices = false;
#endif

// Signed bytes, or weights whose eighth bit is 0.
struct SignedBytes {
  typedef int32x4_t Sum;
  static constexpr bool has_matrices = kMultipliesMatrices;

  // Each lane: sum + its four weights times word `Index`.
  template <int Index>
  static Sum add(Sum sum, uint8x16_t weights, Words words) {
    const int8x16_t own = (int8x16_t)weights;
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_laneq_s32(sum, own, (int8x16_t)words, Index);
#else
    const int8x16_t word = (int8x16_t)vdupq_laneq_u32(words, Index);
    const int16x8_t low = vmull_s8(vget_low_s8(own), vget_low_s8(word)), high = vmull_high_s8(own, word);
    return vpadalq_s16(sum, vpaddq_s16(low, high));  // two products fit 16 bits, for no number of a row is -128
#endif
  }

  // Two outputs of two words, times two rows: sums of the first output, then of the second one.
  static Sum add_matrix(Sum sum, uint8x16_t weights, uint8x16_t rows) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vmmlaq_s32(sum, (int8x16_t)weights, (int8x16_t)rows);
#else
    return sum;
#endif
  }
};

// Weights of eight bits with 128 added, which is taken off here unless an instruction multiplies unsigned ones.
struct UnsignedBytes : SignedBytes {
  static constexpr int offset = kMultipliesMatrices ? 128 : 0;  // what sums are still to be corrected by

  template <int Index>
  static Sum add(Sum sum, uint8x16_t weights, Words words) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_laneq_s32(sum, weights, (int8x16_t)words, Index);
#else
    return SignedBytes::add<Index>(sum, veorq_u8(weights, vdupq_n_u8(128)), words);
#endif
  }

  static Sum add_matrix(Sum sum, uint8x16_t weights, uint8x16_t rows) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusmmlaq_s32(sum, weights, (int8x16_t)rows);
#else
    return sum;
#endif
  }
};

#if OUTPACE_BFDOT
struct BfloatPairs {
  typedef float32x4_t Sum;
  static constexpr bool has_matrices = true;

  template <int Index>
  static Sum add(Sum sum, uint8x16_t weights, Words words) {
    return vbfdotq_laneq_f32(sum, (bfloat16x8_t)weights, (bfloat16x8_t)words, Index);
  }

  static Sum add_matrix(Sum sum, uint8x16_t weights, uint8x16_t rows) {
    return vbfmmlaq_f32(sum, (bfloat16x8_t)weights, (bfloat16x8_t)rows);
  }
};
#endif

// Words of two rows, two of the one and two of the other: the first two of four, then the last two.
static inline void pair_rows(const void* row, const void* other, uint8x16_t (&to)[2]) {
  const uint64x2_t a = (uint64x2_t)load_words(row), b = (uint64x2_t)load_words(other);
  to[0] = (uint8x16_t)vzip1q_u64(a, b), to[1] = (uint8x16_t)vzip2q_u64(a, b);
}

// Words of four outputs, two of each: outputs 0 and 1, then outputs 2 and 3.
static inline void pair_words(uint8x16_t first, uint8x16_t second, uint8x16_t (&to)[2]) {
  to[0] = (uint8x16_t)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second);
  to[1] = (uint8x16_t)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second);
}

// Of the sums of matrices of outputs 0 and 1, and of 2 and 3: those of the first row, or of the second one.
template <class Sum>
static inline Sum sums_of_row(Sum low, Sum high, int row) {
  const uint32x4_t a = (uint32x4_t)low, b = (uint32x4_t)high;
  return (Sum)(row ? vuzp2q_u32(a, b) : vuzp1q_u32(a, b));
}

constexpr int kPanelVectors = 8;  // of four outputs

// A panel of [words][32] times R rows, by rows in pairs: out [R][32]. The number of words is a multiple of 4.
template <class Product, int R>
static inline void multiply_in_pairs(const uint8_t* panel, const void* const* rows, int words, void* out) {
  constexpr int P = (R + 1) / 2, V = P > 2 ? 2 : 4;  // 16 sums
  for (int v = 0; v < kPanelVectors; v += V) {
    typename Product::Sum sums[P][V][2] = {};
    const uint8_t* own = panel + 16 * v;
    for (int word = 0; word < words; word += 4, own += 4 * 128) {
      uint8x16_t pairs[P][2];
      for (int p = 0; p < P; ++p) {
        const size_t at = 4 * size_t(word);
        pair_rows((const uint8_t*)rows[2 * p] + at, (const uint8_t*)rows[2 * p + 1 < R ? 2 * p + 1 : 2 * p] + at, pairs[p]);
      }
      for (int half = 0; half < 2; ++half)
        for (int each = 0; each < V; ++each) {
          uint8x16_t weights[2];
          const uint8_t* from = own + 256 * half + 16 * each;
          pair_words(vld1q_u8(from), vld1q_u8(from + 128), weights);
          for (int p = 0; p < P; ++p)
            for (int side = 0; side < 2; ++side)
              sums[p][each][side] = Product::add_matrix(sums[p][each][side], weights[side], pairs[p][half]);
        }
    }
    for (int r = 0; r < R; ++r)
      for (int each = 0; each < V; ++each) {
        const auto found = sums_of_row(sums[r / 2][each][0], sums[r / 2][each][1], r % 2);
        std::memcpy((char*)out + 128 * r + 16 * (v + each), &found, sizeof found);
      }
  }
}

// The same by the fewest instructions for so many rows.
template <class Product, int R>
static inline void multiply_words(const uint8_t* panel, const void* const* rows, int words, void* out) {
  if constexpr (Product::has_matrices && R >= 4) {
    multiply_in_pairs<Product, R>(panel, rows, words, out);
  } else {
    constexpr int V = R > 4 ? 2 : R > 2 ? 4 : 8;
    for (int v = 0; v < kPanelVectors; v += V) {
      typename Product::Sum sums[R][V] = {};
      const uint8_t* own = panel + 16 * v;
      for (int word = 0; word < words; word += 4, own += 4 * 128) {
        Words four[R];
        for (int r = 0; r < R; ++r) four[r] = load_words((const uint8_t*)rows[r] + 4 * size_t(word));
        for_each<4>([&](auto index) INLINE {
          for (int each = 0; each < V; ++each) {
            const uint8x16_t weights = vld1q_u8(own + 128 * index + 16 * each);
            for (int r = 0; r < R; ++r) sums[r][each] = Product::template add<index>(sums[r][each], weights, four[r]);
          }
        });
      }
      for (int r = 0; r < R; ++r)
        for (int each = 0; each < V; ++each) std::memcpy((char*)out + 128 * r + 16 * (v + each), &sums[r][each], 16);
    }
  }
}
#endif
