#pragma once

#include "kernels.h"
#include "kernels/simd.h"

// The block formats of docs/engine_format.md as types: how a panel's code lines decode to code bytes, and where its
// scales lie. A format is `BlockFormat<Codes, Scales, zero>`; weights are scale · (code - zero) or scale · code + min.

namespace aotllm::cpu::AOTLLM_ISA {

inline constexpr int kLineBytes = 64;
/// Groups of four k in a block of 32.
inline constexpr int kQuads = 8;

// ---- codes. `get<G>(lines)` is group G of a block for all rows, `at` one code, k in [0, 32). `kMaxSum` is how many
// groups' products fit an int16 pair sum: kMaxSum · 2 · 127 · largest code ≤ 32767. `kFitsInt16`: so do the products of
// half a block, 16 · 127 · largest code, and it is worth it.

struct Codes4 {
  static constexpr int kLines = 4;
  static constexpr int kMaxSum = 8;
  static constexpr bool kFitsInt16 = true;
  /// With other bits above the low four.
  template <int G>
  static U8x64 shifted(const std::uint8_t* lines) {
    const U8x64 line = load_line(lines + G / 2 * kLineBytes);
    if constexpr (G % 2 == 0) return line;
    return shift_words<-4>(line);
  }
  template <int G>
  static U8x64 get(const std::uint8_t* lines) {
    return bit_and(shifted<G>(lines), 0x0F);
  }
  static int at(const std::uint8_t* lines, int row, int k) {
    return lines[k / 8 * kLineBytes + 4 * row + k % 4] >> (k / 4 % 2 * 4) & 0x0F;
  }
};

struct Codes5 {
  static constexpr int kLines = 5;
  static constexpr int kMaxSum = 4;
  static constexpr bool kFitsInt16 = false;
  template <int G>
  static U8x64 get(const std::uint8_t* lines) {
    const U8x64 high = shift_words<4 - G>(load_line(lines + 4 * kLineBytes));
    return merge_bits<0x0F>(Codes4::shifted<G>(lines), bit_and(high, 0x10));
  }
  static int at(const std::uint8_t* lines, int row, int k) {
    const int high = lines[4 * kLineBytes + 4 * row + k % 4] >> (k / 4) & 1;
    return Codes4::at(lines, row, k) | high << 4;
  }
};

struct Codes6 {
  static constexpr int kLines = 6;
  static constexpr int kMaxSum = 2;
  static constexpr bool kFitsInt16 = false;
  template <int G>
  static U8x64 get(const std::uint8_t* lines) {
    const U8x64 high = shift_words<4 - 2 * (G % 4)>(load_line(lines + (4 + G / 4) * kLineBytes));
    return merge_bits<0x0F>(Codes4::shifted<G>(lines), bit_and(high, 0x30));
  }
  static int at(const std::uint8_t* lines, int row, int k) {
    const int high = lines[(4 + k / 16) * kLineBytes + 4 * row + k % 4] >> (k / 4 % 4 * 2) & 3;
    return Codes4::at(lines, row, k) | high << 4;
  }
};

struct Codes8 {
  static constexpr int kLines = 8;
  static constexpr int kMaxSum = 1;
  static constexpr bool kFitsInt16 = false;
  template <int G>
  static SignedCodes get(const std::uint8_t* lines) {
    return signed_codes(load_line(lines + G * kLineBytes));
  }
  static int at(const std::uint8_t* lines, int row, int k) {
    return static_cast<std::int8_t>(lines[k / 4 * kLineBytes + 4 * row + k % 4]);
  }
};

alignas(16) inline constexpr std::int8_t kIq4NlValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                             1,    13,   25,  38,  53,  69,  89,  113};
/// Twice the E2M1 values, plus 16: unsigned, and a zero point that is a power of two.
alignas(16) inline constexpr std::int8_t kMxfp4Codes[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                            16, 15, 14, 13, 12, 10, 8,  4};

struct CodesIq4Nl {
  static constexpr int kLines = 4;
  static constexpr int kMaxSum = 1;
  static constexpr bool kFitsInt16 = false;
  template <int G>
  static SignedCodes get(const std::uint8_t* lines) {
    return signed_codes(look_up(kIq4NlValues, Codes4::get<G>(lines)));
  }
  static int at(const std::uint8_t* lines, int row, int k) { return kIq4NlValues[Codes4::at(lines, row, k)]; }
};

struct CodesMxfp4 {
  static constexpr int kLines = 4;
  static constexpr int kMaxSum = 4;
  static constexpr bool kFitsInt16 = false;
  template <int G>
  static U8x64 get(const std::uint8_t* lines) {
    return look_up(kMxfp4Codes, Codes4::get<G>(lines));
  }
  static int at(const std::uint8_t* lines, int row, int k) { return kMxfp4Codes[Codes4::at(lines, row, k)]; }
};

// ---- scales. `Block` has those of a block, `group` counts its scale groups; `at` finds a block's in the panel's scale
// area, `Reader` goes through the area block by block.

/// Goes through blocks, of which `Span` share `kBlockBytes`.
template <class Scales, int Span = 1>
struct BlockReader {
  const std::uint8_t* next_block;
  int left = Span;  ///< blocks of those at `next_block`
  typename Scales::Block next() {
    const typename Scales::Block block{next_block};
    if (Span == 1 || --left == 0) {
      next_block += Scales::kBlockBytes;
      left = Span;
    }
    return block;
  }
};

/// Per `Span` blocks: 16 float16 scales, then 16 mins where affine.
template <bool Affine, int Span = 1>
struct ScalesF16 {
  static constexpr int kGroups = 1;
  static constexpr bool kAffine = Affine;
  static constexpr int kBlockBytes = Affine ? 64 : 32;
  struct Block {
    const std::uint8_t* bytes;
    F32x16 scale(int) const { return load_f16(bytes); }
    F32x16 min(int) const { return load_f16(bytes + 32); }
  };
  using Reader = BlockReader<ScalesF16, Span>;
  static Block at(const std::uint8_t* area, int block) { return {area + block / Span * kBlockBytes}; }
};

/// Per block and group: 16 float32 scales.
template <int Groups>
struct ScalesF32 {
  static constexpr int kGroups = Groups;
  static constexpr bool kAffine = false;
  static constexpr int kBlockBytes = Groups * 64;
  struct Block {
    const std::uint8_t* bytes;
    F32x16 scale(int group) const { return from_bits(load_i32(bytes + group * 64)); }
  };
  using Reader = BlockReader<ScalesF32>;
  static Block at(const std::uint8_t* area, int block) { return {area + block * kBlockBytes}; }
};

/// Per superblock of 8 blocks: 16 float16 d, 16 float16 dmin where affine, then per block 16 integer bytes for each
/// group's scale, and for each group's min where affine. scale = d · byte, min = dmin · byte, both exact in float32.
template <int Groups, bool Affine>
struct ScalesSuper {
  static constexpr int kGroups = Groups;
  static constexpr bool kAffine = Affine;
  static constexpr int kFactorBytes = Affine ? 64 : 32;
  static constexpr int kBlockBytes = Groups * (Affine ? 32 : 16);
  static constexpr int kSuperBytes = kFactorBytes + 8 * kBlockBytes;

  struct Block {
    const std::uint8_t* factors;  // of its superblock; loaded anew for each block, since registers are scarce
    const std::uint8_t* bytes;
    F32x16 scale(int group) const {
      return mul(load_f16(factors), to_f32(Affine ? load_u8(bytes + group * 16) : load_i8(bytes + group * 16)));
    }
    F32x16 min(int group) const { return mul(load_f16(factors + 32), to_f32(load_u8(bytes + (Groups + group) * 16))); }
  };
  struct Reader {
    const std::uint8_t* next_block;
    const std::uint8_t* factors = nullptr;
    int left = 0;  ///< blocks of the superblock
    Block next() {
      if (left == 0) {
        factors = next_block;
        next_block += kFactorBytes;
        left = 8;
      }
      --left;
      const Block block{factors, next_block};
      next_block += kBlockBytes;
      return block;
    }
  };
  static Block at(const std::uint8_t* area, int block) {
    const std::uint8_t* super = area + block / 8 * kSuperBytes;
    return {super, super + kFactorBytes + block % 8 * kBlockBytes};
  }
};

template <class CodesT, class ScalesT, int Zero>
struct BlockFormat {
  using Codes = CodesT;
  using Scales = ScalesT;
  static constexpr int kZero = Zero;
};

using FormatQ4_0 = BlockFormat<Codes4, ScalesF16<false>, 8>;
using FormatQ4_1 = BlockFormat<Codes4, ScalesF16<true>, 0>;
using FormatQ5_0 = BlockFormat<Codes5, ScalesF16<false>, 16>;
using FormatQ5_1 = BlockFormat<Codes5, ScalesF16<true>, 0>;
using FormatQ8_0 = BlockFormat<Codes8, ScalesF16<false>, 0>;
using FormatIQ4_NL = BlockFormat<CodesIq4Nl, ScalesF32<1>, 0>;
using FormatMXFP4 = BlockFormat<CodesMxfp4, ScalesF32<1>, 16>;
using FormatQ8_F32 = BlockFormat<Codes8, ScalesF32<2>, 0>;
using FormatQ4_0_G64 = BlockFormat<Codes4, ScalesF16<false, 2>, 8>;
using FormatQ4_0_G128 = BlockFormat<Codes4, ScalesF16<false, 4>, 8>;
using FormatQ4_1_G64 = BlockFormat<Codes4, ScalesF16<true, 2>, 0>;
using FormatQ4_1_G128 = BlockFormat<Codes4, ScalesF16<true, 4>, 0>;
using FormatQ2_K = BlockFormat<Codes4, ScalesSuper<2, true>, 0>;
using FormatQ3_K = BlockFormat<Codes4, ScalesSuper<2, false>, 4>;
using FormatQ4_K = BlockFormat<Codes4, ScalesSuper<1, true>, 0>;
using FormatQ5_K = BlockFormat<Codes5, ScalesSuper<1, true>, 0>;
using FormatQ6_K = BlockFormat<Codes6, ScalesSuper<2, false>, 32>;

}  // namespace aotllm::cpu::AOTLLM_ISA
