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

// From more rows on, codes are unpacked first. Products of matrices need codes in pairs, which are made once for all rows.
#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kMostPacked = 3;
#else
constexpr int kMostPacked = kMostTileRows;
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

// Sums in 16 bits fit for as many groups of 4 inputs: two products of each, of at most 127 and a code less its offset.
// That products are of whole codes does no harm, as long as two fit: what is too much is taken off modulo 2^16.
template <class F>
static constexpr int groups_of_pairs() {
  return F::largest == 255 ? 1 : std::min(F::shared / 4, 32767 / (2 * 127 * std::max(F::offset, F::largest - F::offset)));
}

// Scales multiply integers where a part has two of them, so that floats take its sum only.
template <class F>
static constexpr bool scales_integers() { return kPairs && F::shared == 16 && F::scale == kSigned; }

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

// Each lane: both sums times their factors, in 32 bits.
static inline IntLanes widen_pairs(PairLanes pairs, PairLanes factors) {
#if defined(__AVX512BW__)
  return (IntLanes)_mm512_madd_epi16((__m512i)pairs, (__m512i)factors);
#else
  return (IntLanes)_mm256_madd_epi16((__m256i)pairs, (__m256i)factors);
#endif
}

// Signed bytes, each in both halves of a lane.
static inline PairLanes byte_pairs(const uint8_t* from) {
#if defined(__AVX512BW__)
  const __m512i own = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
  return (PairLanes)_mm512_srai_epi16(_mm512_or_si512(_mm512_slli_epi32(own, 24), _mm512_slli_epi32(own, 8)), 8);
#else
  const __m256i own = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
  return (PairLanes)_mm256_srai_epi16(_mm256_or_si256(_mm256_slli_epi32(own, 24), _mm256_slli_epi32(own, 8)), 8);
#endif
}

// Integers of a part that share a scale: what codes are too large by, times their sum, in pairs.
template <class F, int R>
static inline PairLanes offset_pairs(const Parts& x, int r, int at) {
  const auto sums = [&](int half) { return (PairLanes)(IntLanes{} + x.stored_sum<R>(r, half)); };
  return (F::shared == 16 ? sums(at / 16) : sums(0) + sums(1)) * int16_t(F::offset);
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
  return F::offset;
#endif
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

// The integer sums of V vectors of outputs over the inputs from `at` on that share a scale, of which the codes' offset is
// taken off.
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

#if defined(__AVX2__)
// The same, times `factors`, added to `whole`, where products are summed in pairs.
template <class F, int R, int V, bool Expanded>
static inline void add_pairs(const uint8_t* codes_of, const Parts& x, int part, int at, int v, const PairLanes (&factors)[V], IntLanes (&whole)[R][V]) {
  constexpr int groups = F::shared / 4, most = groups_of_pairs<F>();
  for_each<(groups + most - 1) / most>([&](auto turn) INLINE {
    constexpr int first = turn * most;
    PairLanes sums[R][V] = {};
    if constexpr (F::offset > 0 && F::largest < 255) {
UNROLL
      for (int r = 0; r < R; ++r) {
        const PairLanes start = -offset_pairs<F, R>(x, r, at);
UNROLL
        for (int each = 0; each < V; ++each) sums[r][each] = start;
      }
    }
    for_each<std::min(most, groups - first)>([&](auto index) INLINE {
      for_each<V>([&](auto each) INLINE {
        const CodeLanes codes = codes_of_four<F, Expanded>(codes_of, part * groups + first + index, v + each);
        for_each<R>([&](auto r) INLINE {
          sums[r][each] += pair_products<F>(codes, four_at((const uint8_t*)x.four<R>(r, at + 4 * (first + index))));
          asm("" : "+v"(sums[r][each]));  // or compilers keep all products in memory before they add them
        });
      });
    });
UNROLL
    for (int r = 0; r < R; ++r)
UNROLL
      for (int each = 0; each < V; ++each) whole[r][each] += widen_pairs(sums[r][each], factors[each]);
  });
}
#endif

// -scale * sum of the integers of a row that share a minimum.
template <class F, int R>
static inline float less_of(const Parts& x, int r, int at) {
  const size_t index = x.scale_at(r);
  if constexpr (F::shared == kPart) return x.less[index];
  return -x.scales[index] * float(x.sum<R>(r, at / 16));
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
          const auto place = [&](int each) { return piece * kOutputs + (v + each) * kLanes; };
          const uint8_t* ahead = v == 0 && turn.has(at * F::parts + piece) ? block + kBytesAhead + piece * (F::bytes / F::parts) : nullptr;
#if defined(__AVX2__)
          if constexpr (kPairs) {
            if (ahead) fetch_groups<F>(ahead, 0, F::shared / 4);
            if (half == 0 || !scales_integers<F>()) std::memset(whole, 0, sizeof whole);
            PairLanes factors[V];
UNROLL
            for (int each = 0; each < V; ++each) factors[each] = scales_integers<F>() ? byte_pairs(block + F::scales_at + place(each)) : PairLanes{} + int16_t(1);
            add_pairs<F, R, V, Expanded>(codes, x, piece, input, v, factors, whole);
            if (scales_integers<F>() && half + 1 < pieces) continue;
          } else
#endif
          sum_part<F, R, V, Expanded>(codes, ahead, x, piece, input, v, whole);
UNROLL
          for (int each = 0; each < V; ++each) {
            Lanes scale = unit[each], minimum = {};
            if constexpr (F::scale != kNone && !scales_integers<F>()) scale *= byte_lanes<F::scale>(block + F::scales_at + place(each));
            if constexpr (F::has_minimum) {
              if constexpr (F::scale == kPacked) minimum = least[each] * byte_lanes<kPacked>(block + F::scales_at + place(each), 1);
              else if constexpr (F::is_super) minimum = least[each] * byte_lanes<kUnsigned>(block + F::minima_at + place(each));
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
