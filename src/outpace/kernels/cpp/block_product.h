// Products of rows with weights in the block formats of GGUF files (formats.h).
// Python reference: outpace.kernels.blocks.reference_product.
//
// A row is rounded to 8-bit integers with a scale for each 32 of them. Products within a block are integers, whose sums
// are exact; blocks are summed in float in the order of inputs. So each number of a result is batch-invariant.
#pragma once
#include "pairs.h"
#include <type_traits>

// With more rows than this, codes are unpacked first. Products of matrices need codes in pairs, which are made once for
// all rows.
#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kMostPacked = 3;
#else
constexpr int kMostPacked = kMostTileRows;
#endif

// Each lane: sum + 4 codes times 4 numbers; the codes less 128 where products come in pairs.
static inline IntLanes add_products(IntLanes sum, CodeLanes codes, int32_t four) {
#if defined(__AVX512VNNI__)
  return (IntLanes)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVX2__) && !defined(__AVX512BW__) && defined(__AVXVNNI__)
  return (IntLanes)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(four));
#elif defined(__AVX2__)
  return sum + widen_pairs(pair_products<Form<kQ8_0>>(codes, four), PairLanes{} + int16_t(1));
#else
  int8_t numbers[4];
  std::memcpy(numbers, &four, 4);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int each = 0; each < 4; ++each) sum[lane] += int32_t(codes[4 * lane + each]) * numbers[each];
  return sum;
#endif
}

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
    for (int each = 0; each < V; ++each)  // the first sum of a row is the same in all lanes
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

// The offset of codes in the form in which they are multiplied.
template <class F>
static constexpr int offset_of() {
#if defined(__aarch64__)
  return F::largest == 255 ? F::offset - 128 + UnsignedBytes::offset : F::offset;
#else
  return F::offset;
#endif
}

// The integer sums of V vectors of outputs over the inputs from `at` on that share a scale, without the offset of the
// codes.
template <class F, int R, int V, bool Expanded>
static inline void sum_part(const uint8_t* codes_of, const uint8_t* ahead, const Parts& x, int part, int at, int v, IntLanes (&whole)[R][V]) {
  constexpr int groups = F::shared / 4, offset = offset_of<F>();
UNROLL
  for (int r = 0; r < R; ++r) {
    int32_t start = 0;
    if constexpr (offset != 0)
      start = -offset * (F::shared == 16 ? x.sum<R>(r, at / 16) : x.sum<R>(r, 0) + x.sum<R>(r, 1));
UNROLL
    for (int each = 0; each < V; ++each) whole[r][each] = IntLanes{} + start;
  }
#if defined(__aarch64__)
  if constexpr (Expanded && kMultipliesMatrices) {
    if (ahead) fetch_groups<F>(ahead, 0, groups);
    return add_matrices<F, R, V>(codes_of + part * groups * 128 + v * 32, x.numbers + at, x.stride, whole);
  }
#endif
  const auto take_codes = [&](int group, int each) {
    if (ahead && each == 0) fetch_groups<F>(ahead, group, group + 1);
    return codes_of_four<F, Expanded>(codes_of, part * groups + group, v + each);
  };
#if defined(__aarch64__)
UNROLL
  for (int group = 0; group < groups; group += 4) {
    Words four[R];
UNROLL
    for (int r = 0; r < R; ++r) four[r] = load_words(x.four<R>(r, at + 4 * group));
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
UNROLL
  for (int group = 0; group < groups; ++group) {
    CodeLanes codes[V];
UNROLL
    for (int each = 0; each < V; ++each) codes[each] = take_codes(group, each);
UNROLL
    for (int r = 0; r < R; ++r)
UNROLL
      for (int each = 0; each < V; ++each) whole[r][each] = add_products(whole[r][each], codes[each], int32_t(four_at((const uint8_t*)x.four<R>(r, at + 4 * group))));
  }
#endif
}

// A panel's sums over some blocks at a tile of R rows, added to `out`. Not inlined: registers are assigned to it alone.
template <class F, int R, bool Expanded>
__attribute__((noinline)) static void multiply_blocks(const uint8_t* first, const uint8_t* codes_of, int count, Turn turn, const Parts& rows, float (*out)[kOutputs]) {
  constexpr int V = kLanes <= 8 && (R == 1 || (kPairs && R == 2)) ? 4 : 2, pieces = kPart / F::shared;  // vectors of outputs at a time
UNROLL
  for (int v = 0; v < kBlockVectors; v += V) {
    Lanes sums[R][V];
UNROLL
    for (int r = 0; r < R; ++r)
UNROLL
      for (int each = 0; each < V; ++each) sums[r][each] = load(out[r] + (v + each) * kLanes);
    Parts x = rows;
    const uint8_t *block = first, *codes = codes_of;
    for (int at = 0; at < count; ++at, block += F::bytes, codes += Expanded ? F::inputs * kOutputs : F::bytes) {
      Lanes unit[V], least[V];
UNROLL
      for (int each = 0; each < V; ++each) {
        unit[each] = unit_lanes<F>(block, v + each);
        if constexpr (F::has_minimum) least[each] = half_lanes(block + F::least_at + 2 * (v + each) * kLanes);
      }
      for (int part = 0; part < F::inputs / kPart; ++part, x = x.after<R>(1)) {
        IntLanes whole[R][V];
UNROLL
        for (int half = 0; half < pieces; ++half) {
          const int piece = part * pieces + half, input = half * F::shared;
          const uint8_t* ahead = v == 0 && turn.has(at * F::parts + piece) ? block + kBytesAhead + piece * (F::bytes / F::parts) : nullptr;
#if defined(__AVX2__)
          if constexpr (kPairs) sum_pairs<F, R, V, Expanded>(block, codes, ahead, x, piece, input, v, whole);
          else
#endif
            sum_part<F, R, V, Expanded>(codes, ahead, x, piece, input, v, whole);
          if (scales_integers<F>() && half + 1 < pieces) continue;
UNROLL
          for (int each = 0; each < V; ++each) {
            const int place = piece * kOutputs + (v + each) * kLanes;
            Lanes scale = unit[each], minimum = {};
            if constexpr (F::scale != kNone && !scales_integers<F>()) scale *= byte_lanes<F::scale>(block + F::scales_at + place);
            if constexpr (F::has_minimum) {
              if constexpr (F::scale == kPacked) minimum = least[each] * byte_lanes<kPacked>(block + F::scales_at + place, 1);
              else if constexpr (F::is_super) minimum = least[each] * byte_lanes<kUnsigned>(block + F::minima_at + place);
              else minimum = -least[each];  // the file's sign is another
            }
UNROLL
            for (int r = 0; r < R; ++r) {
              Lanes& sum = sums[r][each];
              sum = fma(__builtin_convertvector(whole[r][each], Lanes), scale * x.scales[x.scale_at(r)], sum);
              if constexpr (F::has_minimum) sum = fma(minimum, all(less_of<F, R>(x, r, input)), sum);
            }
          }
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
static inline void multiply_tile(int rows, const uint8_t* block, const uint8_t* codes, int count, Turn turn, const Parts& x, int part, float (*out)[kOutputs]) {
  if (rows == R) multiply_blocks<F, R, Expanded>(block, codes, count, turn, x.after<R>(part), out);
  else if constexpr (R > 1) multiply_tile<F, R - 1, Expanded>(rows, block, codes, count, turn, x, part, out);
}

constexpr int kInputsAtOnce = 256;  // whose codes stay in the nearest cache, unpacked, for all tiles

// The 32 outputs of a panel at all rows.
static inline void multiply_block_panel(int32_t format, const uint8_t* panel, const Parts& x, int rows, int height, float (*out)[kOutputs]) {
  with_form(format, [&](auto form) {
    using F = decltype(form);
    std::memset(out, 0, sizeof(float) * kOutputs * rows);
    constexpr bool is_costly = F::planes > 0 || F::has_pairs || F::has_table || (kLanes > 8 && F::codes != kBytes);
    constexpr bool unpacks = is_costly || kMostPacked < kMostTileRows;
    const bool expands = unpacks && rows > kMostPacked;
    alignas(64) uint8_t expanded[kInputsAtOnce * kOutputs];
    for (int input = 0; input < x.inputs; input += kInputsAtOnce) {
      const uint8_t* block = panel + size_t(input / F::inputs) * F::bytes;
      const int count = std::min(kInputsAtOnce, x.inputs - input) / F::inputs;
      for (int each = 0; expands && each < count; ++each) expand<F>(block + each * F::bytes, expanded + each * F::inputs * kOutputs);
      for (int first = 0; first < rows; first += height) {
        const int own = std::min(height, rows - first);
        const Turn turn(first / height, (rows + height - 1) / height);
        if (expands) multiply_tile<F, kMostTileRows, true>(own, block, expanded, count, turn, x.from(first), input / kPart, out + first);
        else multiply_tile<F, kMostPacked, false>(own, block, block, count, turn, x.from(first), input / kPart, out + first);
      }
    }
  });
}
