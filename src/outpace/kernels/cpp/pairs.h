// Sums of products with weights in the block formats of GGUF files on x86 without VNNI, where bytes are multiplied into
// sums of two products of 16 bits.
#pragma once
#include "parts.h"

// Sums in 16 bits fit for as many groups of 4 inputs: two products of each, of at most 127 and a code less its offset.
// That products are of whole codes does no harm, as long as two fit: what is too much is taken off modulo 2^16.
template <class F>
static constexpr int groups_of_pairs() {
  return F::largest == 255 ? 1 : std::min(F::shared / 4, 32767 / (2 * 127 * std::max(F::offset, F::largest - F::offset)));
}

// Scales multiply integers where sums fit for all inputs that share one: it takes no further instruction.
template <class F>
static constexpr bool scales_integers() {
  return kPairs && groups_of_pairs<F>() == F::shared / 4 && (F::scale == kUnsigned || F::scale == kSigned);
}

typedef int16_t PairLanes __attribute__((vector_size(4 * kLanes)));

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

// Where `byte_pairs` takes bytes from: each twice, into the low or the high bytes of a lane's halves.
template <bool High>
struct BytePlaces {
  alignas(64) uint8_t from[4 * kLanes];
  constexpr BytePlaces() : from() {
    for (int at = 0; at < 4 * kLanes; ++at) from[at] = at % 2 == High ? at / 4 : 128;
  }
};

// Scales, signed or not, each in both halves of a lane.
template <bool Signed>
static inline PairLanes byte_pairs(const uint8_t* from) {
  static constexpr BytePlaces<Signed> places;
#if defined(__AVX512BW__)
  __m512i own = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
  own = _mm512_shuffle_epi8(own, _mm512_load_si512(places.from));
#else
  __m256i own = _mm256_shuffle_epi8(_mm256_set1_epi64x(bits_at<int64_t>(from)), _mm256_load_si256((const __m256i*)places.from));
#endif
  return Signed ? (PairLanes)own >> 8 : (PairLanes)own;
}

// The offset of codes of inputs that share a scale, times the sum of a row's integers, in pairs.
template <class F, int R>
static inline PairLanes offset_pairs(const Parts& x, int r, int at) {
  const auto sums = [&](int half) { return (PairLanes)(IntLanes{} + x.stored_sum<R>(r, half)); };
  return (F::shared == 16 ? sums(at / 16) : sums(0) + sums(1)) * int16_t(F::offset);
}

// The integer sums of V vectors of outputs over the inputs from `at` on that share a scale, of which the codes' offset is
// taken off. Where scales multiply integers, sums with the second scale of a part are added to those with the first.
template <class F, int R, int V, bool Expanded>
static inline void sum_pairs(const uint8_t* block, const uint8_t* codes_of, const uint8_t* ahead, const Parts& x, int part, int at, int v, IntLanes (&whole)[R][V]) {
  constexpr int groups = F::shared / 4, most = groups_of_pairs<F>();
  if (ahead) fetch_groups<F>(ahead, 0, groups);
  if (at == 0 || !scales_integers<F>()) std::memset(whole, 0, sizeof whole);
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
          if constexpr (most > 1) asm("" : "+v"(sums[r][each]));  // or compilers keep all products in memory before they add them
        });
      });
    });
UNROLL
    for (int each = 0; each < V; ++each) {
      PairLanes factors = PairLanes{} + int16_t(1);
      if constexpr (scales_integers<F>()) factors = byte_pairs<F::scale == kSigned>(block + F::scales_at + part * kOutputs + (v + each) * kLanes);
UNROLL
      for (int r = 0; r < R; ++r) whole[r][each] += widen_pairs(sums[r][each], factors);
    }
  });
}
#endif
