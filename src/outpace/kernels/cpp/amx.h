// Products of attention by the tiles of AMX: 16 queries to a tile, and keys and values in bfloat16.
#pragma once
#include "attention_block.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define OUTPACE_AMX 1
#else
#define OUTPACE_AMX 0
#endif

#if OUTPACE_AMX
// Whether the system gives this process the tiles of AMX; it has to be asked once.
static inline bool has_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// While this lives, all tiles have 16 rows of 64 bytes, and subnormal floats count as 0, as they do in tiles.
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

// Scores of 16 keys per block and 16 queries [width / 2][16][2]: [16 * blocks][16]. Width is a multiple of 32.
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

// Add to out [width][16] the values of some halves of a tile, transposed [halves][width][32], by their weights
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
