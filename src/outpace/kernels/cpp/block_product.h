// Products of rows with weights in the block formats of GGUF files (formats.h).
// Python reference: outpace.kernels.blocks.reference_product.
//
// A row is rounded to 8-bit integers with a scale for each 32 of them. Products within a block are integers, whose sums
// are exact; blocks are summed in float in the order of inputs. So each number of a result is batch-invariant.
#pragma once
#include "codes.h"
#include "rows.h"
#include <type_traits>

// Registers hold a product's sums only where loops over them are unrolled; portable code would become too long.
#if defined(__AVX2__) || defined(__aarch64__)
#define UNROLL _Pragma("GCC unroll 8")
#else
#define UNROLL
#endif

// Rows of a product at a time, as many as registers hold sums for; and from how many on codes are unpacked first, where
// that costs anything. Products of matrices need codes in pairs, which are made once for all rows.
#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kBlockRows = 8, kMostPacked = 3;
#else
constexpr int kBlockRows = 4, kMostPacked = 4;
#endif

// Rows of activations: 8-bit integers, their scales, sums of 16, and -scale * sum of 32.
struct Parts {
  const int8_t* numbers;  // [rows][stride]
  const float* scales;    // [rows][inputs / 32]
  const float* less;      // [rows][inputs / 32]
  const int32_t* sums;    // [rows][inputs / 16]
  int32_t stride, inputs;
};

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__) && defined(__AVXVNNI__)) || !defined(__AVX2__)
// How many groups of 4 inputs are summed before a sum is widened; 0 where nothing needs widening.
template <class F>
static constexpr int groups_of_pairs() { return 0; }
#else
// Sums of products are kept in 16 bits: two products of each group, of a code and at most 127.
template <class F>
static constexpr int groups_of_pairs() { return F::largest == 255 ? 1 : 32767 / (2 * 127 * F::largest); }
#endif

typedef int16_t PairLanes __attribute__((vector_size(4 * kLanes)));

// Each lane: sum + 4 codes times 4 numbers.
static inline IntLanes add_products(IntLanes sum, CodeLanes codes, int32_t four) {
#if defined(__AVX512VNNI__)
  return (IntLanes)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVX2__) && !defined(__AVX512F__) && defined(__AVXVNNI__)
  return (IntLanes)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(four));
#else
  int8_t numbers[4];
  std::memcpy(numbers, &four, 4);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int each = 0; each < 4; ++each) sum[lane] += int32_t(codes[4 * lane + each]) * numbers[each];
  return sum;
#endif
}

#if defined(__AVX2__)
// Each lane: sums of two products, 16 bits. Codes of 8 bits lose their offset of 128, or two products would not fit.
template <class F>
static inline PairLanes pair_products(CodeLanes codes, int32_t four) {
#if defined(__AVX512BW__)
  const __m512i numbers = _mm512_set1_epi32(four);
  if constexpr (F::largest < 255) return (PairLanes)_mm512_maddubs_epi16((__m512i)codes, numbers);
  const __m512i whole = _mm512_xor_si512((__m512i)codes, _mm512_set1_epi8(char(128)));
  const __m512i zero = _mm512_setzero_si512();
  const __m512i turned = _mm512_mask_sub_epi8(numbers, _mm512_movepi8_mask(whole), zero, numbers);
  return (PairLanes)_mm512_maddubs_epi16(_mm512_abs_epi8(whole), turned);
#else
  const __m256i numbers = _mm256_set1_epi32(four);
  if constexpr (F::largest < 255) return (PairLanes)_mm256_maddubs_epi16((__m256i)codes, numbers);
  const __m256i whole = _mm256_xor_si256((__m256i)codes, _mm256_set1_epi8(char(128)));
  return (PairLanes)_mm256_maddubs_epi16(_mm256_sign_epi8(whole, whole), _mm256_sign_epi8(numbers, whole));
#endif
}

static inline IntLanes widen_pairs(PairLanes pairs) {
#if defined(__AVX512BW__)
  return (IntLanes)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#else
  return (IntLanes)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#endif
}
#endif

#if defined(__aarch64__)
template <class F>
using CodeBytes = typename std::conditional<F::largest == 255, UnsignedBytes, SignedBytes>::type;

// Add products of a part's codes, as `expand` pairs them, by rows in pairs.
template <class F, int R, int V>
static inline void add_matrices(const uint8_t* codes, const int8_t* numbers, int stride, IntLanes (&whole)[R][V]) {
  constexpr int P = (R + 1) / 2;
  int32x4_t sums[P][V][2];
UNROLL
  for (int p = 0; p < P; ++p)
UNROLL
    for (int each = 0; each < V; ++each)  // what a row begins with is the same in all lanes
      sums[p][each][0] = sums[p][each][1] = vzip1q_s32((int32x4_t)whole[2 * p][each], (int32x4_t)whole[std::min(2 * p + 1, R - 1)][each]);
UNROLL
  for (int group = 0; group < F::shared / 4; group += 4) {
    uint8x16_t pairs[P][2];
UNROLL
    for (int p = 0; p < P; ++p) {
      const int8_t* own = numbers + 2 * p * stride + 4 * group;
      pair_rows(own, 2 * p + 1 < R ? own + stride : own, pairs[p]);
    }
UNROLL
    for (int half = 0; half < 2; ++half)
UNROLL
      for (int each = 0; each < V; ++each)
UNROLL
        for (int side = 0; side < 2; ++side) {
          const uint8x16_t own = vld1q_u8(codes + (group / 2 + half) * 256 + 32 * each + 16 * side);
UNROLL
          for (int p = 0; p < P; ++p) sums[p][each][side] = CodeBytes<F>::add_matrix(sums[p][each][side], own, pairs[p][half]);
        }
  }
UNROLL
  for (int r = 0; r < R; ++r)
UNROLL
    for (int each = 0; each < V; ++each) whole[r][each] = (IntLanes)sums_of_row(sums[r / 2][each][0], sums[r / 2][each][1], r % 2);
}
#endif

// What codes are too large by, as they are multiplied.
template <class F>
static constexpr int offset_of() {
#if defined(__aarch64__)
  return F::largest == 255 ? F::offset - 128 + UnsignedBytes::offset : F::offset;
#else
  return groups_of_pairs<F>() == 1 && F::largest == 255 ? F::offset - 128 : F::offset;
#endif
}

// The integer sums of V vectors of outputs over one part, of which the codes' offset is taken off.
template <class F, int R, int V, bool Expanded>
static inline void sum_part(const uint8_t* codes_of, const Parts& x, int first, int part, int at, int v, IntLanes (&whole)[R][V]) {
  constexpr int groups = F::shared / 4, pairs = groups_of_pairs<F>(), offset = offset_of<F>();
UNROLL
  for (int r = 0; r < R; ++r) {
    int32_t start = 0;
    if constexpr (offset != 0) {
      const int32_t* own = x.sums + size_t(first + r) * (x.inputs / 16) + at / 16;
      start = -offset * (F::shared == 16 ? own[0] : own[0] + own[1]);
    }
UNROLL
    for (int each = 0; each < V; ++each) whole[r][each] = IntLanes{} + start;
  }
#if defined(__aarch64__)
  const int8_t* numbers = x.numbers + size_t(first) * x.stride + at;
  if constexpr (Expanded && kMultipliesMatrices) return add_matrices<F, R, V>(codes_of + part * groups * 128 + v * 32, numbers, x.stride, whole);
#endif
  const auto take_codes = [&](int group, int each) {
    if constexpr (Expanded) return load_codes(codes_of + (part * groups + group) * 128 + (v + each) * sizeof(CodeLanes));
    else return codes_at<F>(codes_of, part * groups + group, v + each);
  };
  const auto four_of = [&](int r, int group) {
    int32_t four;
    std::memcpy(&four, x.numbers + size_t(first + r) * x.stride + at + 4 * group, 4);
    return four;
  };
#if defined(__aarch64__)
UNROLL
  for (int group = 0; group < groups; group += 4) {
    Words four[R];
UNROLL
    for (int r = 0; r < R; ++r) four[r] = load_words(numbers + size_t(r) * x.stride + 4 * group);
    for_each<4>([&](auto index) INLINE {
UNROLL
      for (int each = 0; each < V; ++each) {
        const uint8x16_t codes = (uint8x16_t)take_codes(group + index, each);
UNROLL
        for (int r = 0; r < R; ++r) whole[r][each] = (IntLanes)CodeBytes<F>::template add<index>((int32x4_t)whole[r][each], codes, four[r]);
      }
    });
  }
#else
  if constexpr (pairs == 0) {
UNROLL
    for (int group = 0; group < groups; ++group) {
      CodeLanes codes[V];
UNROLL
      for (int each = 0; each < V; ++each) codes[each] = take_codes(group, each);
UNROLL
      for (int r = 0; r < R; ++r)
UNROLL
        for (int each = 0; each < V; ++each) whole[r][each] = add_products(whole[r][each], codes[each], four_of(r, group));
    }
  } else {
#if defined(__AVX2__)
#pragma GCC unroll 2  // more at once, and compilers keep the sums in memory
    for (int begin = 0; begin < groups; begin += pairs) {
      PairLanes sums[R][V] = {};
#pragma GCC unroll 2
      for (int group = begin; group < std::min(groups, begin + pairs); ++group)
UNROLL
        for (int each = 0; each < V; ++each) {
          const CodeLanes codes = take_codes(group, each);
UNROLL
          for (int r = 0; r < R; ++r) sums[r][each] += pair_products<F>(codes, four_of(r, group));
        }
UNROLL
      for (int r = 0; r < R; ++r)
UNROLL
        for (int each = 0; each < V; ++each) whole[r][each] += widen_pairs(sums[r][each]);
    }
#endif
  }
#endif
}

// -scale * sum of the integers of a row that share a minimum.
template <class F>
static inline float less_of(const Parts& x, int row, size_t index, int at) {
  if constexpr (F::shared == kPart) return x.less[index];
  return -x.scales[index] * float(x.sums[size_t(row) * (x.inputs / 16) + at / 16]);
}

// How far ahead weights are fetched into the second cache: memory takes longer than hardware looks ahead.
constexpr int kBytesAhead = 8192;

// Lines of 64 bytes that are fetched while a block is multiplied.
struct Lines {
  const uint8_t* block;
  int first, last;

  // Fetch those of one of `parts` steps.
  void fetch(int part, int parts) const {
    const int count = last - first;
    for (int line = first + count * part / parts; line < first + count * (part + 1) / parts; ++line)
      __builtin_prefetch(block + kBytesAhead + 64 * line, 0, 2);
  }
};

// A panel's sums over one block at R rows, added to `out`.
template <class F, int R, bool Expanded>
static inline void multiply_block(const uint8_t* block, const uint8_t* codes_of, const Lines& ahead, const Parts& x, int first, int input, float (*out)[kOutputs]) {
  constexpr int V = kLanes <= 8 && R == 1 ? 4 : 2;  // vectors of outputs at a time
UNROLL
  for (int v = 0; v < kBlockVectors; v += V) {
    Lanes unit[V], least[V], sums[R][V];
UNROLL
    for (int r = 0; r < R; ++r)
UNROLL
      for (int each = 0; each < V; ++each) sums[r][each] = load(out[r] + (v + each) * kLanes);
UNROLL
    for (int each = 0; each < V; ++each) {
      unit[each] = unit_lanes<F>(block, v + each);
      if constexpr (F::has_minimum) least[each] = half_lanes(block + F::least_at + 2 * (v + each) * kLanes);
    }
    for (int part = 0; part < F::parts; ++part) {
      const int at = input + part * F::shared;
      if (v == 0) ahead.fetch(part, F::parts);
      IntLanes whole[R][V];
      sum_part<F, R, V, Expanded>(codes_of, x, first, part, at, v, whole);
UNROLL
      for (int each = 0; each < V; ++each) {
        const int place = part * kOutputs + (v + each) * kLanes;
        Lanes scale = unit[each], minimum = {};
        if constexpr (F::scale != kNone) scale *= byte_lanes<F::scale>(block + F::scales_at + place);
        if constexpr (F::has_minimum) {
          if constexpr (F::scale == kPacked) minimum = least[each] * byte_lanes<kPacked>(block + F::scales_at + place, 1);
          else if constexpr (F::is_super) minimum = least[each] * byte_lanes<kUnsigned>(block + F::minima_at + place);
          else minimum = -least[each];  // the file's sign is another
        }
UNROLL
        for (int r = 0; r < R; ++r) {
          const size_t index = size_t(first + r) * (x.inputs / kPart) + at / kPart;
          Lanes& sum = sums[r][each];
          sum = fma(__builtin_convertvector(whole[r][each], Lanes), scale * x.scales[index], sum);
          if constexpr (F::has_minimum) sum = fma(minimum, all(less_of<F>(x, first + r, index, at)), sum);
        }
      }
    }
UNROLL
    for (int r = 0; r < R; ++r)
UNROLL
      for (int each = 0; each < V; ++each) store(out[r] + (v + each) * kLanes, sums[r][each]);
  }
}

template <class F, int R, bool Expanded>
static inline void add_rest(const uint8_t* block, const uint8_t* codes_of, const Lines& ahead, const Parts& x, int first,
                            int count, int input, float (*out)[kOutputs]) {
  if (count == R) multiply_block<F, R, Expanded>(block, codes_of, ahead, x, first, input, out + first);
  else if constexpr (R > 1) add_rest<F, R - 1, Expanded>(block, codes_of, ahead, x, first, count, input, out);
}

// Of one row, kept in registers through the panel.
template <class F>
static inline void multiply_row(const uint8_t* panel, const Parts& x, float* out) {
  float sums[1][kOutputs] = {};
  for (int input = 0; input < x.inputs; input += F::inputs, panel += F::bytes)
    multiply_block<F, 1, false>(panel, panel, {panel, 0, (F::bytes + 63) / 64}, x, 0, input, sums);
  std::memcpy(out, sums, sizeof sums);
}

// The 32 outputs of a panel at all rows.
static inline void multiply_block_panel(int32_t format, const uint8_t* panel, const Parts& x, int rows, float (*out)[kOutputs]) {
  with_form(format, [&](auto form) {
    using F = decltype(form);
    if (rows == 1) return multiply_row<F>(panel, x, out[0]);
    std::memset(out, 0, sizeof(float) * kOutputs * rows);
    constexpr bool unpacks = F::planes > 0 || F::has_pairs || F::has_table || kMostPacked < kBlockRows;
    const bool expands = unpacks && rows > kMostPacked;
    alignas(64) uint8_t expanded[F::inputs * kOutputs];
    const uint8_t* block = panel;
    for (int input = 0; input < x.inputs; input += F::inputs, block += F::bytes) {
      if (expands) expand<F>(block, expanded);
      for (int first = 0; first < rows; first += kBlockRows) {
        constexpr int lines = (F::bytes + 63) / 64;
        const int count = std::min(kBlockRows, rows - first);
        const Lines ahead = {block, lines * first / rows, lines * (first + count) / rows};
        if (expands) add_rest<F, kBlockRows, true>(block, expanded, ahead, x, first, count, input, out);
        else add_rest<F, kMostPacked, false>(block, block, ahead, x, first, count, input, out);
      }
    }
  });
}
