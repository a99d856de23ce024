// Products of attention, for queries that lie side by side: each lane of a vector is one query.
//
// A score is one sum over the numbers of a key in their order. A weighted sum of values takes 32 positions at a time:
// those of even positions in their order, those of odd ones, and both sums together are added to what is there. That is
// the order of AMX, and the code without AMX keeps it, because rows of a tree are summed by it everywhere. A weight of
// zero changes no sum.
#pragma once
#include <vector>

#include "lanes.h"
#include "neon.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define OUTPACE_AMX 1
#else
#define OUTPACE_AMX 0
#endif

constexpr int kTile = 64;  // positions between two looks at the largest score
constexpr int kSummed = 32;  // positions summed before they are added
constexpr int kKeysAtOnce = 8, kNumbersAtOnce = 8;  // as many sums as it takes to keep a core busy
// Vectors of queries that share what is read of a key or value, 4 keys or numbers at a time. AVX2 broadcasts a number by
// an instruction of its own, and has registers for 12 sums; NEON has them for 16, and short vectors; AVX-512 broadcasts
// within a product.
constexpr int kVectorsAtOnce = kLanes == 16 ? 1 : kLanes == 8 ? 3 : 4, kSharedAtOnce = 4;

// 2^x for x up to 126, and 2^-126 below that, with an error of 2^-23; of 2^-13 where `Roughly`, which is less than
// rounding to bfloat16 leaves.
template <bool Roughly = false>
static inline Lanes power_of_two(Lanes x) {
  x = larger(x, all(-126.0f));
  const Lanes moved = x + 12582912.0f, rest = x - (moved - 12582912.0f);  // to where the last bit is a one
  Lanes p;
  if constexpr (Roughly) {
    p = fma(all(5.5008254e-2f), rest, all(2.4221098e-1f));
    p = fma(p, rest, all(6.9328303e-1f));
  } else {
    p = fma(all(1.3264700e-3f), rest, all(9.6715100e-3f));
    p = fma(p, rest, all(5.5507340e-2f));
    p = fma(p, rest, all(2.4022242e-1f));
    p = fma(p, rest, all(6.9314698e-1f));
  }
  p = fma(p, rest, all(1.0f));
  return (Lanes)((BitLanes)p + ((BitLanes)moved << 23));
}

// The nearest numbers of bfloat16; of two as near the larger one.
static inline Lanes as_bfloat16(Lanes x) { return (Lanes)(((BitLanes)x + 0x8000u) & 0xffff0000u); }

// Numbers of keys by words of 32 bits: one in float32, or two in bfloat16.
struct SingleNumbers {
  template <int Index>
  static Lanes add(Lanes sum, const float* queries, Words keys) { return add_float<Index>(sum, load(queries), keys); }
  static Lanes add_one(Lanes sum, const float* queries, const float* key) { return fma(all(*key), load(queries), sum); }
};

#if defined(__aarch64__) && OUTPACE_BFDOT
struct NumberPairs {
  template <int Index>
  static Lanes add(Lanes sum, const float* queries, Words keys) {
    return (Lanes)BfloatPairs::add<Index>((float32x4_t)sum, vld1q_u8((const uint8_t*)queries), keys);
  }
  static Lanes add_one(Lanes sum, const float* queries, const float* key) {
    Words words = {};
    std::memcpy(&words, key, sizeof *key);
    return add<0>(sum, queries, words);
  }
};
#else
typedef SingleNumbers NumberPairs;
#endif

#if defined(__AVX512BF16__) || (defined(__aarch64__) && OUTPACE_BFDOT)
constexpr bool kMultipliesPairs = true;

// Put one query into places so many apart, as into its lane of a vector [width / 2][kLanes]: two numbers in bfloat16 each.
static inline void take_pairs(const float* query, int width, float* to, int step) {
#if defined(__aarch64__)
  for (int d = 0; d < width; d += 2, to += step) {
    const uint16_t pair[2] = {to_bfloat16(query[d]), to_bfloat16(query[d + 1])};
    std::memcpy(to, pair, sizeof pair);
  }
#else
  for (int d = 0; d < width; d += kLanes) {
    const int count = std::min(kLanes, width - d);
    const __m512 numbers = _mm512_maskz_loadu_ps(__mmask16((1 << count) - 1), query + d);
    float pairs[kLanes / 2];
    _mm256_storeu_si256((__m256i*)pairs, (__m256i)_mm512_cvtneps_pbh(numbers));
    for (int pair = 0; pair < count / 2; ++pair) to[(d / 2 + pair) * step] = pairs[pair];
  }
#endif
}
#else
constexpr bool kMultipliesPairs = false;
static inline void take_pairs(const float*, int, float*, int) {}
#endif

// Scores of `count` keys [count][words] and V vectors of queries [V][words][kLanes]: [count, up to a multiple of K][kLanes]
// each, with `step` numbers from a vector's scores to the next one's. K keys share what is read of queries.
template <class Numbers, int V, int K>
static inline void score_keys(const float* keys, int words, int count, const float* queries, float* out, int step) {
  for (int first = 0; first < count; first += K) {
    const float* key[K];
    for (int each = 0; each < K; ++each) key[each] = keys + size_t(std::min(first + each, count - 1)) * words;
    Lanes sums[V][K] = {};
    int d = 0;
    for (; d + kWords <= words; d += kWords) {
      Words own[K];
      for (int each = 0; each < K; ++each) own[each] = load_words(key[each] + d);
      for_each<kWords>([&](auto index) INLINE {
        for (int each = 0; each < K; ++each)
          for (int v = 0; v < V; ++v)
            sums[v][each] = Numbers::template add<index>(sums[v][each], queries + (v * words + d + index) * kLanes, own[each]);
      });
    }
    for (; d < words; ++d)
      for (int each = 0; each < K; ++each)
        for (int v = 0; v < V; ++v) sums[v][each] = Numbers::add_one(sums[v][each], queries + (v * words + d) * kLanes, key[each] + d);
    for (int v = 0; v < V; ++v)
      for (int each = 0; each < K; ++each) store(out + v * step + (first + each) * kLanes, sums[v][each]);
  }
}

// The value of a position and the weights that a vector of queries gives it.
struct Weighted {
  const float* value;
  const float* weights;  // [kLanes]
};

// Add to out [width][kLanes] what two lists of at most 32 positions sum to: even ones, odd ones.
static inline void mix_values(const std::vector<Weighted>& even, const std::vector<Weighted>& odd, int width, float* out) {
  for (int from = 0; from < width; from += kNumbersAtOnce) {
    const int count = std::min(kNumbersAtOnce, width - from);
    Lanes sums[2][kNumbersAtOnce] = {};
    for (int side = 0; side < 2; ++side)
      for (const Weighted& one : side ? odd : even) {
        const Lanes weights = load(one.weights);
        if (count == kNumbersAtOnce)
          for_each<kNumbersAtOnce>([&](auto d) INLINE {
            const Words numbers = load_words(one.value + from + d / kWords * kWords);
            sums[side][d] = add_float<d % kWords>(sums[side][d], weights, numbers);
          });
        else
          for (int d = 0; d < count; ++d) sums[side][d] = fma(all(one.value[from + d]), weights, sums[side][d]);
      }
    for (int d = 0; d < count; ++d) {
      float* own = out + (from + d) * kLanes;
      store(own, load(own) + (sums[0][d] + sums[1][d]));
    }
  }
}

// The same for V vectors of queries and `count` positions in order, at most 32: out [V][width + 2][kLanes]; weights with
// `step` numbers from a vector's to the next one's. Width is a multiple of 4.
template <int V>
static inline void mix_shared(const float* values, int count, int width, const float* weights, int step, float* out) {
  for (int from = 0; from < width; from += kSharedAtOnce) {
    Lanes sums[2][V][kSharedAtOnce];
    for (int side = 0; side < 2; ++side) {
      Lanes own[V][kSharedAtOnce] = {};
      for (int at = side; at < count; at += 2) {
        Lanes shares[V];
        for (int v = 0; v < V; ++v) shares[v] = load(weights + v * step + at * kLanes);
        for_each<kSharedAtOnce>([&](auto d) INLINE {
          const Words numbers = load_words(values + size_t(at) * width + from + d / kWords * kWords);
          for (int v = 0; v < V; ++v) own[v][d] = add_float<d % kWords>(own[v][d], shares[v], numbers);
        });
      }
      std::memcpy(sums[side], own, sizeof own);
    }
    for (int v = 0; v < V; ++v)
      for (int d = 0; d < kSharedAtOnce; ++d) {
        float* to = out + (v * (width + 2) + from + d) * kLanes;
        store(to, load(to) + (sums[0][v][d] + sums[1][v][d]));
      }
  }
}

#if OUTPACE_AMX
// Whether the system lends this process the tiles of AMX; it has to be asked once.
static inline bool has_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// All tiles with 16 rows of 64 bytes, as long as this lives; and numbers too small for a float's bits are 0, as in tiles.
struct Tiles {
  struct __attribute__((packed)) Shape {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  explicit Tiles(bool used) : used_(used) {
    if (!used_) return;
    Shape shape;
    for (int tile = 0; tile < 8; ++tile) shape.bytes[tile] = 64, shape.rows[tile] = 16;
    _tile_loadconfig(&shape);
    _mm_setcsr(before_ | kFlushToZero);
  }
  ~Tiles() {
    if (!used_) return;
    _tile_release();
    _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kFlushToZero = 0x8040;
  const bool used_;
  const unsigned before_ = _mm_getcsr();
};

// Compilers do not see what is read into a tile.
static inline void finish_stores() { asm volatile("" ::: "memory"); }

// Scores of 16 keys to a block and 16 queries [width / 2][16][2]: [16 * blocks][16]. Width is a multiple of 32.
template <int Blocks>
static inline void score_blocks(const uint16_t* keys, int width, const uint16_t* queries, float* out) {
  _tile_zero(0);
  if constexpr (Blocks > 1) _tile_zero(1);
  if constexpr (Blocks > 2) _tile_zero(2);
  if constexpr (Blocks > 3) _tile_zero(3);
  const int stride = 2 * width;
  for (int d = 0; d < width; d += 32, keys += 32) {
    _tile_loadd(4, queries + d * 16, 64);
    _tile_loadd(5, keys, stride);
    _tile_dpbf16ps(0, 5, 4);
    if constexpr (Blocks > 1) _tile_loadd(6, keys + 16 * width, stride);
    if constexpr (Blocks > 1) _tile_dpbf16ps(1, 6, 4);
    if constexpr (Blocks > 2) _tile_loadd(5, keys + 32 * width, stride);
    if constexpr (Blocks > 2) _tile_dpbf16ps(2, 5, 4);
    if constexpr (Blocks > 3) _tile_loadd(6, keys + 48 * width, stride);
    if constexpr (Blocks > 3) _tile_dpbf16ps(3, 6, 4);
  }
  _tile_stored(0, out, 64);
  if constexpr (Blocks > 1) _tile_stored(1, out + 256, 64);
  if constexpr (Blocks > 2) _tile_stored(2, out + 512, 64);
  if constexpr (Blocks > 3) _tile_stored(3, out + 768, 64);
}

// The same for any number of keys; up to 15 rows behind them are read, and their scores mean nothing.
static inline void score_tiles(const uint16_t* keys, int width, int count, const uint16_t* queries, float* out) {
  finish_stores();
  for (; count > 48; count -= 64, keys += 64 * width, out += 1024) score_blocks<4>(keys, width, queries, out);
  if (count > 32) score_blocks<3>(keys, width, queries, out);
  else if (count > 16) score_blocks<2>(keys, width, queries, out);
  else if (count > 0) score_blocks<1>(keys, width, queries, out);
}

// Values of up to 32 positions [count, width] with rows made columns: [width][32], zeros behind them.
template <bool Whole>
static inline void turn_rows(const uint16_t* values, int width, int count, uint16_t* out) {
  static const uint16_t zeros[8] = {};
  const auto four = [&](int position, int d) {  // positions 8 apart, 8 numbers of each
    __m512i found = _mm512_setzero_si512();
    const auto at = [&](int which) {
      return _mm_loadu_si128((const __m128i*)(Whole || which < count ? values + size_t(which) * width + d : zeros));
    };
    found = _mm512_mask_broadcast_i32x4(found, 0x000f, at(position));
    found = _mm512_mask_broadcast_i32x4(found, 0x00f0, at(position + 8));
    found = _mm512_mask_broadcast_i32x4(found, 0x0f00, at(position + 16));
    return _mm512_mask_broadcast_i32x4(found, 0xf000, at(position + 24));
  };
  for (int d = 0; d < width; d += 8) {
    __m512i pairs[8], fours[8];
    for (int each = 0; each < 8; each += 2) {
      const __m512i left = four(each, d), right = four(each + 1, d);
      pairs[each] = _mm512_unpacklo_epi16(left, right), pairs[each + 1] = _mm512_unpackhi_epi16(left, right);
    }
    for (int each = 0; each < 8; each += 4)
      for (int side = 0; side < 2; ++side) {
        fours[each + 2 * side] = _mm512_unpacklo_epi32(pairs[each + side], pairs[each + 2 + side]);
        fours[each + 2 * side + 1] = _mm512_unpackhi_epi32(pairs[each + side], pairs[each + 2 + side]);
      }
    for (int each = 0; each < 4; ++each) {
      uint16_t* to = out + (d + 2 * each) * kSummed;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi64(fours[each], fours[4 + each]));
      _mm512_storeu_si512(to + kSummed, _mm512_unpackhi_epi64(fours[each], fours[4 + each]));
    }
  }
}

static inline void turn_values(const uint16_t* values, int width, int count, uint16_t* out) {
  if (count == kSummed) turn_rows<true>(values, width, count, out);
  else turn_rows<false>(values, width, count, out);
}

// Add to out [width][16] the values of some halves of a tile, turned [halves][width][32], by their weights
// [halves][16][16][2].
template <int Blocks>
static inline void mix_blocks(const uint16_t* turned, int width, int halves, const uint16_t* weights, float* out) {
  _tile_loadd(0, out, 64);
  _tile_loadd(1, out + 256, 64);
  if constexpr (Blocks > 2) _tile_loadd(2, out + 512, 64);
  if constexpr (Blocks > 2) _tile_loadd(3, out + 768, 64);
  for (int half = 0; half < halves; ++half, turned += width * kSummed, weights += 16 * kSummed) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, turned, 64);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, turned + 16 * kSummed, 64);
    _tile_dpbf16ps(1, 6, 4);
    if constexpr (Blocks > 2) _tile_loadd(5, turned + 32 * kSummed, 64);
    if constexpr (Blocks > 2) _tile_dpbf16ps(2, 5, 4);
    if constexpr (Blocks > 2) _tile_loadd(6, turned + 48 * kSummed, 64);
    if constexpr (Blocks > 2) _tile_dpbf16ps(3, 6, 4);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
  if constexpr (Blocks > 2) _tile_stored(2, out + 512, 64);
  if constexpr (Blocks > 2) _tile_stored(3, out + 768, 64);
}

static inline void mix_tiles(const uint16_t* turned, int width, int halves, const uint16_t* weights, float* out) {
  finish_stores();
  int d = 0;
  for (; d + 64 <= width; d += 64) mix_blocks<4>(turned + d * kSummed, width, halves, weights, out + d * 16);
  if (d < width) mix_blocks<2>(turned + d * kSummed, width, halves, weights, out + d * 16);
}
#else
static inline bool has_amx() { return false; }
struct Tiles {
  explicit Tiles(bool) {}
};
#endif
