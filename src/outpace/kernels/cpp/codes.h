// The codes and scales of blocks of panels (formats.h), in vectors of outputs.
#pragma once
#include "formats.h"
#include "neon.h"

constexpr int kBlockVectors = kOutputs / kLanes;

typedef uint8_t CodeLanes __attribute__((vector_size(4 * kLanes)));

static inline CodeLanes load_codes(const uint8_t* from) { return bits_at<CodeLanes>(from); }

// Bytes `value` where a bit of `bits` is set.
static inline CodeLanes spread_bits(const uint8_t* bits, uint8_t value) {
#if defined(__AVX512BW__)
  return (CodeLanes)_mm512_maskz_set1_epi8(bits_at<uint64_t>(bits), char(value));
#elif defined(__AVX2__)
  const __m256i places = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201ull));
  const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(four_at(bits))), places), each);
  return (CodeLanes)_mm256_and_si256(_mm256_cmpeq_epi8(spread, each), _mm256_set1_epi8(char(value)));
#elif defined(__aarch64__)
  const uint8x16_t each = (uint8x16_t)vdupq_n_u64(0x8040201008040201);
  const uint8x16_t places = (uint8x16_t)vcombine_u64(vdup_n_u64(0), vdup_n_u64(0x0101010101010101));
  const uint8x16_t set = vtstq_u8(vqtbl1q_u8((uint8x16_t)vdupq_n_u16(uint16_t(bits[0] | bits[1] << 8)), places), each);
  return (CodeLanes)vandq_u8(set, vdupq_n_u8(value));
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
#elif defined(__aarch64__)
  return (CodeLanes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
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
#if defined(__aarch64__)
  typedef CodeLanes Wide;
#else
  typedef uint16_t Wide __attribute__((vector_size(4 * kLanes)));  // bytes have no shift
#endif
  CodeLanes codes = (CodeLanes)((Wide)stored >> shift);
  if (sizeof(codes[0]) != sizeof(Wide{}[0]) || shift + int(F::codes) < 8) codes &= uint8_t(F::codes == kNibbles ? 15 : 3);
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

// The codes of a block in whole bytes, unpacked once for several groups of rows: [groups][32][4], or for products of
// matrices two groups side by side [groups / 2][32][2][4].
template <class F>
static inline void expand(const uint8_t* block, uint8_t* to) {
#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
  for (int group = 0; group < F::groups; group += 2)
    for (int v = 0; v < kBlockVectors; ++v, to += 32) {
      uint8x16_t codes[2];
      pair_words((uint8x16_t)codes_at<F>(block, group, v), (uint8x16_t)codes_at<F>(block, group + 1, v), codes);
      vst1q_u8(to, codes[0]), vst1q_u8(to + 16, codes[1]);
    }
#else
  for (int group = 0; group < F::groups; ++group)
    for (int v = 0; v < kBlockVectors; ++v, to += sizeof(CodeLanes)) {
      const CodeLanes codes = codes_at<F>(block, group, v);
      std::memcpy(to, &codes, sizeof codes);
    }
#endif
}

// Lanes of bytes, halves and exponents as floats. Of packed bytes the low or the high half.
template <Scale S>
static inline Lanes byte_lanes(const uint8_t* from, int half = 0) {
#if defined(__aarch64__)
  uint32_t bytes = four_at(from);
  if constexpr (S == kPacked) bytes = (half ? bytes >> 4 : bytes) & 0x0f0f0f0fu;
  const uint8x8_t own = (uint8x8_t)vdup_n_u32(bytes);
  if constexpr (S == kSigned) return (Lanes)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8((int8x8_t)own))));
  return (Lanes)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(own))));
#else
  uint8_t unpacked[kLanes];
  if constexpr (S == kPacked) {
    for (int lane = 0; lane < kLanes; ++lane) unpacked[lane] = half ? from[lane] >> 4 : from[lane] & 15;
    from = unpacked;
  }
#if defined(__AVX512BW__)
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
#endif
}

static inline Lanes half_lanes(const uint8_t* from) {
#if defined(__AVX512BW__)
  return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
  return (Lanes)vcvt_f32_f16((float16x4_t)vld1_u8(from));
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
