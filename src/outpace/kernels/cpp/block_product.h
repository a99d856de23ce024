// Products of rows with weights in the block formats of GGUF files (formats.h).
// Python reference: outpace.kernels.blocks.reference_product.
//
// A row is rounded to 8-bit integers with a scale for each 32 of them. Products within a block are integers, whose sums
// are exact; blocks are summed in float in the order of inputs. So each number of a result is batch-invariant.
#pragma once
#include "formats.h"
#include "rows.h"

// Registers hold a product's sums only where loops over them are unrolled; portable code would become too long.
#if defined(__AVX2__)
#define UNROLL _Pragma("GCC unroll 8")
#else
#define UNROLL
#endif

constexpr int kBlockVectors = kOutputs / kLanes;
constexpr int kBlockRows = 4;  // of a product at a time: as many as registers hold sums for

// Rows of activations: 8-bit integers, their scales, sums of 16, and -scale * sum of 32.
struct Parts {
  const int8_t* numbers;  // [rows][stride]
  const float* scales;    // [rows][inputs / 32]
  const float* less;      // [rows][inputs / 32]
  const int32_t* sums;    // [rows][inputs / 16]
  int32_t stride, inputs;
};

typedef uint8_t CodeLanes __attribute__((vector_size(4 * kLanes)));
typedef int16_t PairLanes __attribute__((vector_size(4 * kLanes)));

static inline CodeLanes load_codes(const uint8_t* from) {
  CodeLanes codes;
  std::memcpy(&codes, from, sizeof codes);
  return codes;
}

// Bytes `value` where a bit of `bits` is set.
static inline CodeLanes spread_bits(const uint8_t* bits, uint8_t value) {
#if defined(__AVX512BW__)
  uint64_t mask;
  std::memcpy(&mask, bits, 8);
  return (CodeLanes)_mm512_maskz_set1_epi8(mask, char(value));
#elif defined(__AVX2__)
  uint32_t four;
  std::memcpy(&four, bits, 4);
  const __m256i places = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201ull));
  const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(four)), places), each);
  return (CodeLanes)_mm256_and_si256(_mm256_cmpeq_epi8(spread, each), _mm256_set1_epi8(char(value)));
#else
  CodeLanes spread;
  for (int at = 0; at < 4 * kLanes; ++at) spread[at] = bits[at / 8] >> at % 8 & 1 ? value : 0;
  return spread;
#endif
}

template <int32_t Id>
static inline CodeLanes look_up(CodeLanes codes) {
  const uint8_t* table = table_of<Id>();
#if defined(__AVX512BW__)
  return (CodeLanes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)codes);
#elif defined(__AVX2__)
  return (CodeLanes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), (__m256i)codes);
#else
  CodeLanes found;
  for (int at = 0; at < 4 * kLanes; ++at) found[at] = table[codes[at]];
  return found;
#endif
}

// The codes of 4 inputs of the outputs of vector `v` of a panel.
template <class F>
static inline CodeLanes codes_at(const uint8_t* block, int group, int v) {
  const int half = v * kLanes / 16, bytes = v * kLanes % 16 * 4;
  if constexpr (F::codes == kBytes) return load_codes(block + group * 128 + half * 64 + bytes);
  const CodeLanes stored = load_codes(block + (F::codes == kNibbles ? group : group / 2) * 64 + bytes);
  const int shift = F::codes == kNibbles ? 4 * half : 4 * (group % 2) + 2 * half;
  typedef uint16_t Wide __attribute__((vector_size(4 * kLanes)));  // bytes have no shift
  CodeLanes codes = (CodeLanes)((Wide)stored >> shift) & uint8_t(F::codes == kNibbles ? 15 : 3);
  if constexpr (F::has_pairs) {
    const CodeLanes high = load_codes(block + F::code_bytes + group / 2 * 64 + bytes);
    const int place = 4 * (group % 2) + 2 * half;  // of the two bits in a byte, which go to bits 4 and 5
    codes |= (CodeLanes)(place < 4 ? (Wide)high << (4 - place) : (Wide)high >> (place - 4)) & uint8_t(48);
  }
  for (int plane = 0; plane < F::planes; ++plane)
    codes |= spread_bits(block + F::code_bytes + (group * F::planes + plane) * 16 + half * 8 + bytes / 8,
                         uint8_t(1 << (int(F::codes) + plane)));
  if constexpr (F::has_table) codes = look_up<F::id>(codes);
  return codes;
}

// The codes of a block in whole bytes, unpacked once for several groups of rows: [groups][32][4].
template <class F>
static inline void expand(const uint8_t* block, uint8_t* to) {
  for (int group = 0; group < F::groups; ++group)
    for (int v = 0; v < kBlockVectors; ++v, to += sizeof(CodeLanes)) {
      const CodeLanes codes = codes_at<F>(block, group, v);
      std::memcpy(to, &codes, sizeof codes);
    }
}

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__) && defined(__AVXVNNI__)) || !defined(__AVX2__)
// How many groups of 4 inputs are summed before a sum is widened; 0 where nothing needs widening.
template <class F>
static constexpr int groups_of_pairs() { return 0; }
#else
// Sums of products are kept in 16 bits: two products of each group, of a code and at most 127.
template <class F>
static constexpr int groups_of_pairs() { return F::largest == 255 ? 1 : 32767 / (2 * 127 * F::largest); }
#endif

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

// Lanes of bytes, halves and exponents as floats. Of packed bytes the low or the high half.
template <Scale S>
static inline Lanes byte_lanes(const uint8_t* from, int half = 0) {
  uint8_t unpacked[kLanes];
  if constexpr (S == kPacked) {
    for (int lane = 0; lane < kLanes; ++lane) unpacked[lane] = half ? from[lane] >> 4 : from[lane] & 15;
    from = unpacked;
  }
#if defined(__AVX512F__)
  const __m128i own = _mm_loadu_si128((const __m128i*)from);
  return (Lanes)_mm512_cvtepi32_ps(S == kSigned ? _mm512_cvtepi8_epi32(own) : _mm512_cvtepu8_epi32(own));
#elif defined(__AVX2__)
  const __m128i own = _mm_loadl_epi64((const __m128i*)from);
  return (Lanes)_mm256_cvtepi32_ps(S == kSigned ? _mm256_cvtepi8_epi32(own) : _mm256_cvtepu8_epi32(own));
#else
  Lanes lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = S == kSigned ? float(int8_t(from[lane])) : float(from[lane]);
  return lanes;
#endif
}

static inline Lanes half_lanes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Lanes lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = half_at(from + 2 * lane);
  return lanes;
#endif
}

template <class F>
static inline Lanes unit_lanes(const uint8_t* block, int v) {
  if constexpr (F::unit == kHalf) return half_lanes(block + F::units_at + 2 * v * kLanes);
  Lanes lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = from_exponent(block[F::units_at + v * kLanes + lane]);
  return lanes;
}

// The integer sums of V vectors of outputs over one part, of which the codes' offset is taken off.
template <class F, int R, int V, bool Expanded>
static inline void sum_part(const uint8_t* codes_of, const Parts& x, int first, int part, int at, int v, IntLanes (&whole)[R][V]) {
  constexpr int groups = F::shared / 4, pairs = groups_of_pairs<F>();
  constexpr int offset = pairs == 1 && F::largest == 255 ? F::offset - 128 : F::offset;
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
  const auto take_codes = [&](int group, int each) {
    if constexpr (Expanded) return load_codes(codes_of + (part * groups + group) * 128 + (v + each) * sizeof(CodeLanes));
    else return codes_at<F>(codes_of, part * groups + group, v + each);
  };
  const auto four_of = [&](int r, int group) {
    int32_t four;
    std::memcpy(&four, x.numbers + size_t(first + r) * x.stride + at + 4 * group, 4);
    return four;
  };
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

// A panel's sums over one block at R rows, added to `sums`.
template <class F, int R, bool Expanded>
static inline void multiply_block(const uint8_t* block, const uint8_t* codes_of, const Lines& ahead, const Parts& x, int first, int input, Lanes (&sums)[R][kBlockVectors]) {
  constexpr int V = kLanes == 8 && R == 1 ? 4 : 2;  // vectors of outputs at a time
UNROLL
  for (int v = 0; v < kBlockVectors; v += V) {
    Lanes unit[V], least[V];
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
          Lanes& sum = sums[r][v + each];
          sum = fma(__builtin_convertvector(whole[r][each], Lanes), scale * x.scales[index], sum);
          if constexpr (F::has_minimum) sum = fma(minimum, all(less_of<F>(x, first + r, index, at)), sum);
        }
      }
    }
  }
}

template <class F, int R, bool Expanded>
static inline void add_block(const uint8_t* block, const uint8_t* codes_of, const Lines& ahead, const Parts& x, int first, int input, float (*out)[kOutputs]) {
  Lanes sums[R][kBlockVectors];
UNROLL
  for (int r = 0; r < R; ++r)
UNROLL
    for (int v = 0; v < kBlockVectors; ++v) sums[r][v] = load(out[first + r] + v * kLanes);
  multiply_block<F, R, Expanded>(block, codes_of, ahead, x, first, input, sums);
UNROLL
  for (int r = 0; r < R; ++r)
UNROLL
    for (int v = 0; v < kBlockVectors; ++v) store(out[first + r] + v * kLanes, sums[r][v]);
}

template <class F, int R, bool Expanded>
static inline void add_rest(const uint8_t* block, const uint8_t* codes_of, const Lines& ahead, const Parts& x, int first,
                            int count, int input, float (*out)[kOutputs]) {
  if (count == R) add_block<F, R, Expanded>(block, codes_of, ahead, x, first, input, out);
  else if constexpr (R > 1) add_rest<F, R - 1, Expanded>(block, codes_of, ahead, x, first, count, input, out);
}


// Of one row, kept in registers through the panel.
template <class F>
static inline void multiply_row(const uint8_t* panel, const Parts& x, float* out) {
  Lanes sums[1][kBlockVectors] = {};
  for (int input = 0; input < x.inputs; input += F::inputs, panel += F::bytes)
    multiply_block<F, 1, false>(panel, panel, {panel, 0, (F::bytes + 63) / 64}, x, 0, input, sums);
  for (int v = 0; v < kBlockVectors; ++v) store(out + v * kLanes, sums[0][v]);
}

// The 32 outputs of a panel at all rows.
static inline void multiply_block_panel(int32_t format, const uint8_t* panel, const Parts& x, int rows, float (*out)[kOutputs]) {
  with_form(format, [&](auto form) {
    using F = decltype(form);
    if (rows == 1) return multiply_row<F>(panel, x, out[0]);
    std::memset(out, 0, sizeof(float) * kOutputs * rows);
    const bool expands = (F::planes > 0 || F::has_pairs || F::has_table) && rows > kBlockRows;
    alignas(64) uint8_t expanded[F::inputs * kOutputs];
    const uint8_t* block = panel;
    for (int input = 0; input < x.inputs; input += F::inputs, block += F::bytes) {
      if (expands) expand<F>(block, expanded);
      for (int first = 0; first < rows; first += kBlockRows) {
        constexpr int lines = (F::bytes + 63) / 64;
        const int count = std::min(kBlockRows, rows - first);
        const Lines ahead = {block, lines * first / rows, lines * (first + count) / rows};
        if (expands) add_rest<F, kBlockRows, true>(block, expanded, ahead, x, first, count, input, out);
        else add_rest<F, kBlockRows, false>(block, block, ahead, x, first, count, input, out);
      }
    }
  });
}
