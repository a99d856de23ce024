// The block formats of GGUF files: their layout in a file, and the panels of 32 outputs that products read.
// Python reference: gguf.quants.dequantize, by outpace.kernels.blocks.reference_product.
//
// A weight is scale * (code - offset) or scale * code - minimum. A block of a panel holds, for 32 outputs: the codes,
// in groups of 4 inputs, output by output, so that one register serves 16 outputs; a bit of codes beyond those in a
// plane, or two bits in pairs; and the scales. It takes about as many bytes as the file's 32 blocks.
#pragma once
#include "lanes.h"

// The numbers that GGUF files give these formats.
enum Format : int32_t {
  kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ2_K = 10, kQ3_K = 11, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14,
  kIQ4_NL = 20, kIQ4_XS = 23, kMXFP4 = 39
};
constexpr int32_t kFromFile = 256;  // a matrix of format f has the kind 256 + f
constexpr int kOutputs = 32;        // of a panel

static inline bool is_from_file(int32_t kind) { return kind >= kFromFile; }

enum Unit { kHalf, kByteExponent };             // what multiplies a block's scales
enum Scale { kNone, kUnsigned, kSigned, kPacked };  // of a block's parts; packed: 4 bits and 4 of the minimum
enum Codes { kTwoBits = 2, kNibbles = 4, kBytes = 8 };

template <int32_t Id>
struct Form {
  static constexpr int32_t id = Id;
  static constexpr bool is_super = Id == kQ2_K || Id == kQ3_K || Id == kQ4_K || Id == kQ5_K || Id == kQ6_K || Id == kIQ4_XS;
  static constexpr int inputs = is_super ? 256 : 32;  // of a block
  static constexpr int shared = Id == kQ6_K || Id == kQ2_K || Id == kQ3_K ? 16 : 32;  // inputs with one scale
  static constexpr int parts = inputs / shared, groups = inputs / 4;
  static constexpr int file_bytes =
      Id == kQ4_0 || Id == kIQ4_NL ? 18 : Id == kQ4_1 ? 20 : Id == kQ5_0 ? 22 : Id == kQ5_1 ? 24 : Id == kQ8_0 ? 34
      : Id == kQ2_K ? 84 : Id == kQ3_K ? 110 : Id == kQ4_K ? 144 : Id == kQ5_K ? 176 : Id == kQ6_K ? 210
      : Id == kIQ4_XS ? 136 : 17;
  static constexpr bool has_table = Id == kIQ4_NL || Id == kIQ4_XS || Id == kMXFP4;  // codes are indices of values
  static constexpr bool has_minimum = Id == kQ4_1 || Id == kQ5_1 || Id == kQ2_K || Id == kQ4_K || Id == kQ5_K;
  static constexpr int offset = has_minimum ? 0 : Id == kQ4_0 ? 8 : Id == kQ5_0 ? 16 : Id == kQ3_K ? 4 : Id == kQ6_K ? 32
                                : Id == kMXFP4 ? 12 : 128;
  static constexpr int largest = Id == kQ8_0 || Id == kIQ4_NL || Id == kIQ4_XS ? 255 : Id == kQ6_K ? 63 : Id == kMXFP4 ? 24
                                 : Id == kQ5_0 || Id == kQ5_1 || Id == kQ5_K ? 31 : 15;  // of the codes as multiplied
  static constexpr Codes codes = Id == kQ8_0 ? kBytes : Id == kQ2_K || Id == kQ3_K ? kTwoBits : kNibbles;
  static constexpr int planes = Id == kQ5_0 || Id == kQ5_1 || Id == kQ5_K || Id == kQ3_K ? 1 : 0;
  static constexpr bool has_pairs = Id == kQ6_K;  // two more bits of a code, laid out like codes of two bits
  static constexpr Unit unit = Id == kMXFP4 ? kByteExponent : kHalf;
  static constexpr Scale scale = !is_super ? kNone : Id == kQ2_K ? kPacked
                                 : Id == kQ3_K || Id == kQ6_K || Id == kIQ4_XS ? kSigned : kUnsigned;
  // Of a block of a panel.
  static constexpr int code_bytes = groups * 16 * codes;
  static constexpr int scales_at = code_bytes + groups * 16 * (has_pairs ? 2 : planes);
  static constexpr int minima_at = scales_at + (is_super ? parts * kOutputs : 0);
  static constexpr int units_at = minima_at + (scale == kUnsigned && has_minimum ? parts * kOutputs : 0);
  static constexpr int least_at = units_at + (unit == kHalf ? 64 : 32);
  static constexpr int bytes = least_at + (has_minimum ? 64 : 0);
};

// Call `work` with the form of a format.
template <class Work>
static inline void with_form(int32_t format, Work work) {
  switch (format) {
    case kQ4_0: return work(Form<kQ4_0>());
    case kQ4_1: return work(Form<kQ4_1>());
    case kQ5_0: return work(Form<kQ5_0>());
    case kQ5_1: return work(Form<kQ5_1>());
    case kQ8_0: return work(Form<kQ8_0>());
    case kQ2_K: return work(Form<kQ2_K>());
    case kQ3_K: return work(Form<kQ3_K>());
    case kQ4_K: return work(Form<kQ4_K>());
    case kQ5_K: return work(Form<kQ5_K>());
    case kQ6_K: return work(Form<kQ6_K>());
    case kIQ4_NL: return work(Form<kIQ4_NL>());
    case kIQ4_XS: return work(Form<kIQ4_XS>());
    case kMXFP4: return work(Form<kMXFP4>());
  }
}

// The values that 4-bit codes stand for, in formats with a table, with the offset added.
template <int32_t Id>
static inline const uint8_t* table_of() {
  alignas(16) static constexpr uint8_t curved[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
  alignas(16) static constexpr uint8_t floats[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  return Id == kMXFP4 ? floats : curved;
}

static inline float from_half(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
  uint32_t wide;
  if (rest >= 0x7c00) wide = sign | 0x7f800000 | (rest & 0x3ff) << 13;  // infinite, or not a number
  else if (rest >= 0x400) wide = sign | ((rest << 13) + 0x38000000);
  else {  // subnormal: rest * 2^-24, exact in a float
    const float number = float(rest) * 5.9604644775390625e-8f;
    wide = bits_at<uint32_t>(&number) | sign;
  }
  return bits_at<float>(&wide);
#endif
}

static inline uint16_t to_half(float number) {
  const uint32_t bits = bits_at<uint32_t>(&number);
  const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest >= 0x477fe000) return uint16_t(sign | 0x7bff);  // the largest that is finite
  if (rest < 0x38800000) return uint16_t(sign | uint32_t(std::lrint(std::fabs(number) * 16777216.0f)));  // subnormal
  return uint16_t(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

static inline float half_at(const uint8_t* from) { return from_half(uint16_t(from[0] | from[1] << 8)); }

// Half of 2^(exponent - 127): MXFP4's values are doubled.
static inline float from_exponent(uint8_t exponent) {
  const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : uint32_t(exponent - 1) << 23;
  return bits_at<float>(&bits);
}

// What a file's block holds, each thing in a byte. `codes` are indices in formats with a table.
struct Unpacked {
  uint8_t codes[256];
  uint8_t scales[16], minima[16];  // as stored: scales are signed where the format says so
  const uint8_t *unit, *least;     // where the factors of scales and minima are
};

template <int32_t Id>
static inline void unpack(const uint8_t* block, Unpacked& to) {
  uint8_t* codes = to.codes;
  const auto halves = [&](const uint8_t* nibbles, int width, int count) {  // low nibbles first, then the high ones
    for (int chunk = 0; chunk < count; ++chunk, nibbles += width, codes += 2 * width)
      for (int at = 0; at < width; ++at) codes[at] = nibbles[at] & 15, codes[width + at] = nibbles[at] >> 4;
    codes = to.codes;
  };
  to.unit = block, to.least = block + 2;
  if constexpr (Id == kQ4_0 || Id == kIQ4_NL) halves(block + 2, 16, 1);
  else if constexpr (Id == kQ4_1) halves(block + 4, 16, 1);
  else if constexpr (Id == kMXFP4) halves(block + 1, 16, 1);
  else if constexpr (Id == kQ5_0 || Id == kQ5_1) {
    const uint8_t* bits = block + (Id == kQ5_0 ? 2 : 4);
    const uint32_t fifth = bits_at<uint32_t>(bits);
    halves(bits + 4, 16, 1);
    for (int at = 0; at < 32; ++at) codes[at] |= (fifth >> at & 1) << 4;
  } else if constexpr (Id == kQ8_0) {
    for (int at = 0; at < 32; ++at) codes[at] = block[2 + at] ^ 0x80;  // 128 added
  } else if constexpr (Id == kQ4_K || Id == kQ5_K) {
    const uint8_t* packed = block + 4;
    for (int part = 0; part < 4; ++part) to.scales[part] = packed[part] & 63, to.minima[part] = packed[part + 4] & 63;
    for (int part = 4; part < 8; ++part) {
      to.scales[part] = (packed[part + 4] & 15) | packed[part - 4] >> 6 << 4;
      to.minima[part] = packed[part + 4] >> 4 | packed[part] >> 6 << 4;
    }
    halves(block + (Id == kQ4_K ? 16 : 48), 32, 4);
    if constexpr (Id == kQ5_K)
      for (int part = 0; part < 8; ++part)
        for (int at = 0; at < 32; ++at) codes[part * 32 + at] |= (block[16 + at] >> part & 1) << 4;
  } else if constexpr (Id == kQ6_K) {
    for (int half = 0; half < 2; ++half) {
      const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
      uint8_t* own = codes + 128 * half;
      for (int at = 0; at < 32; ++at) {
        own[at] = (low[at] & 15) | (high[at] & 3) << 4;
        own[at + 32] = (low[at + 32] & 15) | (high[at] >> 2 & 3) << 4;
        own[at + 64] = low[at] >> 4 | (high[at] >> 4 & 3) << 4;
        own[at + 96] = low[at + 32] >> 4 | (high[at] >> 6) << 4;
      }
    }
    std::memcpy(to.scales, block + 192, 16);
    to.unit = block + 208;
  } else if constexpr (Id == kQ2_K || Id == kQ3_K) {
    const uint8_t* pairs = block + (Id == kQ2_K ? 16 : 32);
    for (int half = 0; half < 2; ++half)
      for (int quarter = 0; quarter < 4; ++quarter)
        for (int at = 0; at < 32; ++at) {
          uint8_t code = pairs[32 * half + at] >> 2 * quarter & 3;
          if constexpr (Id == kQ3_K) code |= (block[at] >> (4 * half + quarter) & 1) << 2;
          codes[128 * half + 32 * quarter + at] = code;
        }
    if constexpr (Id == kQ2_K) {
      for (int part = 0; part < 16; ++part) to.scales[part] = block[part] & 15, to.minima[part] = block[part] >> 4;
      to.unit = block + 80, to.least = block + 82;
    } else {
      const uint8_t* packed = block + 96;
      for (int part = 0; part < 16; ++part) {
        const uint8_t low = part < 8 ? packed[part] & 15 : packed[part - 8] >> 4;
        to.scales[part] = uint8_t((low | (packed[8 + part % 4] >> 2 * (part / 4) & 3) << 4) - 32);
      }
      to.unit = block + 108;
    }
  } else {
    static_assert(Id == kIQ4_XS);
    const int high = block[2] | block[3] << 8;
    for (int part = 0; part < 8; ++part)
      to.scales[part] = uint8_t(((block[4 + part / 2] >> 4 * (part % 2) & 15) | (high >> 2 * part & 3) << 4) - 32);
    halves(block + 8, 16, 8);
  }
}

// A block as numbers, each rounded as the reference rounds it.
template <class F>
static inline void dequantize_block(const Unpacked& block, float* to) {
  const float unit = F::unit == kHalf ? half_at(block.unit) : from_exponent(*block.unit);
  const float least = F::has_minimum ? half_at(block.least) : 0;
  for (int part = 0; part < F::parts; ++part) {
    const float scale = F::scale == kNone ? unit
                        : unit * float(F::scale == kSigned ? int(int8_t(block.scales[part])) : int(block.scales[part]));
    const float minimum = F::is_super ? least * float(block.minima[part]) : -least;
    for (int at = part * F::shared; at < (part + 1) * F::shared; ++at) {
      const int code = F::has_table ? table_of<F::id>()[block.codes[at]] : block.codes[at];
      to[at] = F::has_minimum ? scale * float(code) - minimum : scale * float(code - F::offset);
    }
  }
}

static inline size_t file_row_bytes(int32_t format, int inputs) {
  size_t found = 0;
  with_form(format, [&](auto form) { found = size_t(inputs / form.inputs) * form.file_bytes; });
  return found;
}

static inline size_t block_panel_bytes(int32_t format, int inputs) {
  size_t found = 0;
  with_form(format, [&](auto form) { found = size_t(inputs / form.inputs) * form.bytes; });
  return found;
}

static inline uint32_t four_at(const uint8_t* from) { return bits_at<uint32_t>(from); }

static inline void put_four(uint8_t* to, uint32_t four) { std::memcpy(to, &four, 4); }

// Bit `bit` of four bytes, side by side.
static inline uint32_t bits_of_four(uint32_t four, int bit) { return ((four >> bit & 0x01010101u) * 0x10204080u) >> 28; }

// Two bits of two groups of outputs `output` and `output` + 16 share a byte.
static inline void put_pairs(uint32_t low, uint32_t high, int group, int output, uint8_t* to) {
  uint8_t* own = to + group / 2 * 64 + output * 4;
  const uint32_t both = (low & 0x03030303u) | (high & 0x03030303u) << 2;
  put_four(own, group % 2 ? four_at(own) | both << 4 : both);
}

static inline uint32_t pairs_at(const uint8_t* from, int group, int output) {
  return four_at(from + group / 2 * 64 + output % 16 * 4) >> (group % 2 * 4 + output / 16 * 2) & 0x03030303u;
}

// The codes of outputs `output` and `output` + 16, which share bytes.
template <class F>
static inline void place_codes(const uint8_t* low, const uint8_t* high, int output, uint8_t* to) {
  constexpr uint32_t kFifteen = 0x0f0f0f0fu;
  for (int group = 0; group < F::groups; ++group) {
    const uint32_t a = four_at(low + 4 * group), b = four_at(high + 4 * group);
    if constexpr (F::codes == kBytes) {
      put_four(to + group * 128 + output * 4, a), put_four(to + group * 128 + 64 + output * 4, b);
    } else if constexpr (F::codes == kNibbles) {
      put_four(to + group * 64 + output * 4, (a & kFifteen) | (b & kFifteen) << 4);
    } else {
      put_pairs(a, b, group, output, to);
    }
    if constexpr (F::has_pairs) put_pairs(a >> 4, b >> 4, group, output, to + F::code_bytes);
    for (int plane = 0; plane < F::planes; ++plane) {
      uint8_t* bits = to + F::code_bytes + (group * F::planes + plane) * 16 + output / 2;
      const int shift = output % 2 * 4, bit = int(F::codes) + plane;
      bits[0] |= uint8_t(bits_of_four(a, bit) << shift), bits[8] |= uint8_t(bits_of_four(b, bit) << shift);
    }
  }
}

template <class F>
static inline void place_scales(const Unpacked& block, int output, uint8_t* to) {
  if constexpr (F::is_super)
    for (int part = 0; part < F::parts; ++part) {
      const int packed = F::scale == kPacked ? block.minima[part] << 4 : 0;
      to[F::scales_at + part * kOutputs + output] = uint8_t(block.scales[part] | packed);
      if constexpr (F::scale == kUnsigned && F::has_minimum) to[F::minima_at + part * kOutputs + output] = block.minima[part];
    }
  if constexpr (F::unit == kHalf) std::memcpy(to + F::units_at + 2 * output, block.unit, 2);
  else to[F::units_at + output] = *block.unit;
  if constexpr (F::has_minimum) std::memcpy(to + F::least_at + 2 * output, block.least, 2);
}

// What `place_codes` and `place_scales` made of a block of output `output`, back from a block of a panel.
template <class F>
static inline void unplace(const uint8_t* from, int output, Unpacked& to) {
  constexpr uint32_t kFifteen = 0x0f0f0f0fu;
  const int half = output / 16, own = output % 16;
  for (int group = 0; group < F::groups; ++group) {
    uint32_t four;
    if constexpr (F::codes == kBytes) four = four_at(from + group * 128 + output * 4);
    else if constexpr (F::codes == kNibbles) four = four_at(from + group * 64 + own * 4) >> 4 * half & kFifteen;
    else four = pairs_at(from, group, output);
    if constexpr (F::has_pairs) four |= pairs_at(from + F::code_bytes, group, output) << 4;
    put_four(to.codes + 4 * group, four);
    for (int plane = 0; plane < F::planes; ++plane) {
      const int bits = from[F::code_bytes + (group * F::planes + plane) * 16 + own / 2 + 8 * half] >> own % 2 * 4;
      for (int at = 0; at < 4; ++at) to.codes[4 * group + at] |= uint8_t((bits >> at & 1) << (int(F::codes) + plane));
    }
  }
  if constexpr (F::is_super)
    for (int part = 0; part < F::parts; ++part) {
      const uint8_t scale = from[F::scales_at + part * kOutputs + output];
      to.scales[part] = F::scale == kPacked ? scale & 15 : scale;
      if constexpr (F::scale == kPacked) to.minima[part] = scale >> 4;
      else if constexpr (F::has_minimum) to.minima[part] = from[F::minima_at + part * kOutputs + output];
    }
  to.unit = from + F::units_at + (F::unit == kHalf ? 2 : 1) * output;
  to.least = from + F::least_at + 2 * output;
}

// A row of a weight: in a file's layout, or output `output` of a panel.
struct Row {
  const uint8_t* start;
  int output = -1;
};

// Row `index` of a weight that is in a file's layout or in panels.
static inline Row row_of(int32_t format, const uint8_t* weight, bool is_packed, int64_t index, int inputs) {
  if (!is_packed) return {weight + size_t(index) * file_row_bytes(format, inputs), -1};
  return {weight + size_t(index / kOutputs) * block_panel_bytes(format, inputs), int(index % kOutputs)};
}

template <class F>
static inline void unpack_of(const Row& row, int block, Unpacked& to) {
  if (row.output < 0) unpack<F::id>(row.start + size_t(block) * F::file_bytes, to);
  else unplace<F>(row.start + size_t(block) * F::bytes, row.output, to);
}

static inline void dequantize_row(int32_t format, const Row& row, int inputs, float* to) {
  with_form(format, [&](auto form) {
    using F = decltype(form);
    Unpacked unpacked;
    for (int block = 0; block < inputs / F::inputs; ++block) {
      unpack_of<F>(row, block, unpacked);
      dequantize_block<F>(unpacked, to + block * F::inputs);
    }
  });
}

static inline bool is_finite(const uint8_t* half) { return (half[1] & 0x7c) != 0x7c; }

// One panel of a weight of `count` rows. Whether its factors are finite.
static inline bool place_panel(int32_t format, const Row* rows, int count, int inputs, uint8_t* to) {
  bool finite = true;
  with_form(format, [&](auto form) {
    using F = decltype(form);
    Unpacked low, high;
    for (int block = 0; block < inputs / F::inputs; ++block, to += F::bytes) {
      std::memset(to + F::code_bytes, 0, F::bytes - F::code_bytes);
      for (int output = 0; output < kOutputs / 2; ++output) {
        for (int half = 0; half < 2; ++half) {
          Unpacked& own = half ? high : low;
          const int index = output + 16 * half;
          if (index < count) {
            unpack_of<F>(rows[index], block, own);
            place_scales<F>(own, index, to);
            if constexpr (F::unit == kHalf) finite &= is_finite(own.unit);
            if constexpr (F::has_minimum) finite &= is_finite(own.least);
          } else {
            std::memset(own.codes, 0, sizeof own.codes);  // its scales are zero
          }
        }
        place_codes<F>(low.codes, high.codes, output, to);
      }
    }
  });
  return finite;
}
