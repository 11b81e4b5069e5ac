#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "attention/decode_params.cuh"
//
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

// The two products of decode attention on m16n8k16 tensor-core operations, transposed, so that eight query heads (not
// sixteen) fill an operand:
//   scores [16 positions, 8 heads] += K [16 positions, 16 dims] · Qᵀ [16 dims, 8 heads]
//   values [16 dims, 8 heads]      += Vᵀ [16 dims, 16 positions] · P [16 positions, 8 heads]
// In both results a lane holds heads 2 (lane % 4) and the next: factors of heads stay in their lanes.
//
// FP8 codes become f16 (exactly) in registers. ldmatrix moves pairs of codes, so a lane finds four neighbours where the
// operand wants two and two: for K the dims of each 16 are taken in another order (Q likewise), for V the operand's
// rows 0 … 7 and 8 … 15 are the even and odd dims of 16.
namespace aotllm::cuda {

struct Operand {
  std::uint32_t r[4];
};

template <KvType Type>
__device__ inline void multiply_add(float (&c)[4], const Operand& a, std::uint32_t b0, std::uint32_t b1) {
  if constexpr (Type == KvType::kBf16) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a.r[0], a.r[1], a.r[2], a.r[3], b0, b1, c[0],
                                              c[1], c[2], c[3]);
  } else {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3], a.r[0], a.r[1], a.r[2], a.r[3], b0, b1, c[0], c[1],
                                            c[2], c[3]);
  }
}

/// Two floats as the pair of 16-bit numbers that P is stored in; `low` in the lower half.
template <KvType Type>
__device__ inline std::uint32_t pack_pair(float low, float high) {
  if constexpr (Type == KvType::kBf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

/// E4M3 codes in the lower 16 bits to f16.
__device__ inline std::uint32_t to_half_pair(std::uint32_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return static_cast<std::uint32_t>(pair.x) | static_cast<std::uint32_t>(pair.y) << 16;
}

/// A row of a slab that is read elsewhere in shared memory, where its bytes follow each other.
struct DetachedRow {
  int row = -1;  ///< of the slab; -1 = none
  std::uint32_t address = 0;
};

/// Addresses of 16 × 32-byte pieces of a slab for one lane of ldmatrix.x4.
template <class Tile>
class SlabReader {
 public:
  /// `unit`: shared-memory address of K or V of a stage; `slab` of 16 positions. The four 8 × 8 matrices are, in order:
  /// positions 0 … 7 and 8 … 15 of one 16-byte chunk, then of the next; or, chunk_major, both chunks of positions 0 … 7
  /// first.
  template <bool ChunkMajor>
  __device__ static SlabReader make(std::uint32_t unit, int slab, const DetachedRow& detached) {
    const int lane = opaque_thread() % 32;
    const int low = lane / 8 % 2;
    const int high = lane / 16;
    const int slab_row = lane % 8 + 8 * (ChunkMajor ? high : low);
    const int row = slab * kDecodeSlab + slab_row;
    const bool elsewhere = slab_row == detached.row;
    SlabReader reader;
    reader.row_ = elsewhere ? detached.address : unit + static_cast<std::uint32_t>(Tile::row_offset(row));
    reader.column_ = elsewhere ? Tile::kColumnBytes : Tile::kTokens * Tile::kColumnBytes;
    reader.swizzle_ =
        static_cast<std::uint32_t>((elsewhere ? 0 : Tile::row_swizzle(row)) ^ (16 * (ChunkMajor ? low : high)));
    return reader;
  }
  /// Address of the row's chunk `chunk` (even) or the one after it.
  __device__ const cute::uint128_t* at(int chunk) const {
    const std::uint32_t column = static_cast<std::uint32_t>(chunk / Tile::kColumnChunks) * column_;
    const std::uint32_t inside = static_cast<std::uint32_t>(chunk % Tile::kColumnChunks * 16);
    return reinterpret_cast<const cute::uint128_t*>(__cvta_shared_to_generic(row_ + column + (inside ^ swizzle_)));
  }

 private:
  std::uint32_t row_;
  std::uint32_t column_;  ///< bytes from one column of the row to the next
  std::uint32_t swizzle_;
};

__device__ inline Operand load_operand(const cute::uint128_t* address) {
  Operand x;
  cute::SM75_U32x4_LDSM_N::copy(*address, x.r[0], x.r[1], x.r[2], x.r[3]);
  return x;
}
__device__ inline Operand load_transposed(const cute::uint128_t* address) {
  Operand x;
  cute::SM75_U16x8_LDSM_T::copy(*address, x.r[0], x.r[1], x.r[2], x.r[3]);
  return x;
}

/// What one ldmatrix brings (32 bytes of the head for 16 positions) as operands: one for bf16 (16 dims), two for FP8
/// (32 dims).
template <KvType Type>
using Operands = Operand[Type == KvType::kBf16 ? 1 : 2];

/// Of the first product.
template <KvType Type>
__device__ inline void to_key_operands(const Operand& x, Operands<Type>& out) {
  if constexpr (Type == KvType::kBf16) {
    out[0] = x;
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out[i] = {to_half_pair(x.r[2 * i] & 0xffff), to_half_pair(x.r[2 * i + 1] & 0xffff),
                to_half_pair(x.r[2 * i] >> 16), to_half_pair(x.r[2 * i + 1] >> 16)};
    }
  }
}

/// Of the second product.
template <KvType Type>
__device__ inline void to_value_operands(const Operand& x, Operands<Type>& out) {
  if constexpr (Type == KvType::kBf16) {
    out[0] = x;
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // positions 0 … 7, 8 … 15
        // Codes of positions t, t + 1 of an even dim, then of the odd one.
        const std::uint32_t codes = __byte_perm(x.r[2 * i + half], 0, 0x3120);
        out[i].r[2 * half] = to_half_pair(codes & 0xffff);
        out[i].r[2 * half + 1] = to_half_pair(codes >> 16);
      }
    }
  }
}

/// Calls use(piece, what `load(address)` gave) for the pieces of a slab's row in order, with a few loads in flight.
template <class Tile, int Ahead, class Load, class Use>
__device__ inline void for_pieces(const SlabReader<Tile>& reader, Load load, Use use) {
  constexpr int kPieces = Tile::kRowBytes / 32;
  constexpr int kAhead = Ahead < kPieces ? Ahead : kPieces;
  Operand ring[kAhead];
#pragma unroll
  for (int piece = 0; piece < kAhead; ++piece) ring[piece] = load(reader.at(2 * piece));
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const Operand x = ring[piece % kAhead];
    if (piece + kAhead < kPieces) ring[piece % kAhead] = load(reader.at(2 * (piece + kAhead)));
    use(piece, x);
  }
}

/// Queries of an item as operands: Q[i][n] is that of dims 16 i … and heads 8 n ….
template <class Tile, int HeadTiles>
struct QueryOperands {
  static constexpr int kSteps = Tile::kHeadDim / 16;
  std::uint32_t b[kSteps][HeadTiles][2];
  float scale[HeadTiles][2];  ///< of this lane's two heads: what to multiply scores with

  /// `queries`: [heads] rows of kQueryStride bytes in shared memory.
  __device__ void load(const std::uint8_t* queries, int heads, float score_scale) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < HeadTiles; ++n) {
      const int head = 8 * n + lane / 4;
      const bool exists = head < heads;
      const std::uint8_t* row = queries + (exists ? head : 0) * Tile::kQueryStride;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint2 pair;
        if constexpr (Tile::kType == KvType::kBf16) {
          pair.x = *reinterpret_cast<const std::uint32_t*>(row + 32 * i + 4 * (lane % 4));
          pair.y = *reinterpret_cast<const std::uint32_t*>(row + 32 * i + 4 * (lane % 4) + 16);
        } else {
          pair = *reinterpret_cast<const uint2*>(row + 32 * i + 8 * (lane % 4));
        }
        b[i][n][0] = exists ? pair.x : 0;
        b[i][n][1] = exists ? pair.y : 0;
      }
      scale[n][0] = scale[n][1] = score_scale;
      if constexpr (Tile::kType == KvType::kFp8) to_half(n, score_scale);
    }
  }

 private:
  /// bf16 to f16, every head multiplied by the power of two that brings its largest value into [1, 2): nothing
  /// overflows, and what f16 cannot hold is below 2^-24 of the largest.
  __device__ void to_half(int n, float score_scale) {
    std::uint32_t largest = 0;  // bits of |q|, which order as numbers do
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        largest = max(largest, max(b[i][n][k] & 0x7fff, b[i][n][k] >> 16 & 0x7fff));
      }
    }
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const std::uint32_t exponent = min(max(largest >> 7, 1u), 253u);
    const float shrink = __uint_as_float((254 - exponent) << 23);
    const float grow = __uint_as_float(exponent << 23);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float low = __uint_as_float(b[i][n][k] << 16) * shrink;
        const float high = __uint_as_float(b[i][n][k] & 0xffff0000u) * shrink;
        b[i][n][k] = pack_pair<KvType::kFp8>(low, high);
      }
    }
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < 2; ++j) scale[n][j] = score_scale * __shfl_sync(~0u, grow, (2 * (lane % 4) + j) * 4);
  }
};

}  // namespace aotllm::cuda
