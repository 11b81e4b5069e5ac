#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <utility>

#include "gemm/int_fragment.cuh"
#include "gemm/int_shape.cuh"

// acc += W · x of blocks of 64 rows × 128 columns, by a warpgroup; codes · x where a row has one scale. For few tokens
// each warp multiplies its 16 rows on its own, so that the compiler is free to mix conversions and products; for more,
// a warpgroup's instructions read x once for all of its warps.
namespace aotllm::cuda {

constexpr int kIntSteps = kIntColumns / 16;  // of the tensor cores

/// A thread's codes of a block, and what scales and zeros its rows r and r + 8 have.
template <class Tile>
struct IntBlock {
  static constexpr int kWords = Tile::kCodeBytes / 128 / 4;
  static constexpr int kGroups = Tile::kGroups > 0 ? Tile::kGroups : 1;
  std::uint32_t words[kWords];
  float scales[kGroups][2];
  std::uint32_t zeros[kGroups][2];

  __device__ IntBlock(const IntShared<Tile>& shared, int stage, int strip, int block) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const auto* codes = reinterpret_cast<const uint4*>(shared.codes(stage, strip) + block * Tile::kCodeBytes) + thread;
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 piece = codes[128 * i];
      words[4 * i] = piece.x, words[4 * i + 1] = piece.y, words[4 * i + 2] = piece.z, words[4 * i + 3] = piece.w;
    }
    if constexpr (Tile::kGroups > 0) {
      const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i) {
        const int at = (block * kGroups + i / 2) * kIntRows + row + 8 * (i % 2);
        scales[i / 2][i % 2] = shared.scales(stage, strip)[at];
        zeros[i / 2][i % 2] = shared.zeros(stage, strip)[at];
      }
    }
  }

  __device__ IntZeros zeros4(int group) const {
    if constexpr (Tile::kFour) return IntZeros(zeros[group][0], zeros[group][1]);
    return {};
  }

  /// 128 − zero of rows r and r + 8, where codes are stored less 128: an operand like those of codes.
  __device__ void shifts(int group, std::uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = int_bits(__float2bfloat162_rn(128.0f - static_cast<float>(zeros[group][i % 2])));
    }
  }

  __device__ void fragment(int step, const IntZeros& zero, std::uint32_t (&a)[4]) const {
    if constexpr (Tile::kFour) {
      int_fragment4(words[step], zero, a);
    } else {
      int_fragment8(words[2 * step], words[2 * step + 1], a);
    }
  }

  /// acc[kCount] += sum · scales, rounded once in every instantiation. Not left to the compiler: products and sums in
  /// blocks of their own made tiles of 128 tokens wrong beyond the 64th (nvcc 13.0; IntegersMatchFloat64 has full
  /// tiles).
  template <int kCount = Tile::kAcc>
  __device__ void scale(float* acc, const float (&sum)[kCount], int group) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[i] = fmaf(scales[group][i / 2 % 2], sum[i], acc[i]);
  }
};

template <class Mma, std::size_t... kIndex>
__device__ inline void int_mma(const std::uint32_t (&a)[4], std::uint64_t x, float* sum, integer::gmma::ScaleOut scale,
                               std::index_sequence<kIndex...>) {
  Mma::fma(a[0], a[1], a[2], a[3], x, sum[kIndex]..., scale);
}

/// sum (+)= the operands `a` of kSteps steps of 16 columns, whose first is step `first`, · kTokens of x; where there
/// are shifts, they are added to each. All is done when it returns.
template <class Tile, int kTokens, int kSteps>
__device__ void int_products(float (&sum)[kTokens / 2], std::uint32_t (&a)[kSteps][4], std::uint32_t (&shifts)[4],
                             std::uint64_t x, int first, bool clear) {
  using integer::gmma::ScaleOut;
  constexpr auto kIndex = std::make_index_sequence<kTokens / 2>{};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) cute::warpgroup_fence_operand(a[i][j]);
  }
  if constexpr (Tile::kShifts) {
#pragma unroll
    for (int j = 0; j < 4; ++j) cute::warpgroup_fence_operand(shifts[j]);
  }
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) cute::warpgroup_fence_operand(sum[i]);
  cute::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = first + i;
    const std::uint64_t at = x + step / 4 * (Tile::kXBytes / 2 / 16) + 2 * (step % 4);
    int_mma<IntMma<kTokens>>(a[i], at, sum, clear && i == 0 ? ScaleOut::Zero : ScaleOut::One, kIndex);
    if constexpr (Tile::kShifts) int_mma<IntMma<kTokens>>(shifts, at, sum, ScaleOut::One, kIndex);
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_wait<0>();
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) cute::warpgroup_fence_operand(sum[i]);
}

/// sum (+)= codes · x of kChunk steps of 16 columns from `first` on.
template <class Tile>
__device__ void int_chunk(float (&sum)[Tile::kAcc], const IntBlock<Tile>& block, const IntZeros& zeros,
                          std::uint32_t (&shifts)[4], std::uint64_t x, int first, bool clear) {
  std::uint32_t a[Tile::kChunk][4];
#pragma unroll
  for (int i = 0; i < Tile::kChunk; ++i) block.fragment(first + i, zeros, a[i]);
  int_products<Tile, Tile::kTokens>(sum, a, shifts, x, first, clear);
}

/// The block by instructions of the whole warpgroup.
template <class Tile>
__device__ void int_multiply_group(float (&acc)[Tile::kAcc], const IntBlock<Tile>& block, const std::uint8_t* x) {
  const std::uint64_t at = int_descriptor(cute::cast_smem_ptr_to_uint(x));
  std::uint32_t shifts[4] = {};
  if constexpr (Tile::kGroups == 0) {
#pragma unroll
    for (int first = 0; first < kIntSteps; first += Tile::kChunk) {
      int_chunk<Tile>(acc, block, {}, shifts, at, first, false);
    }
  } else {
    constexpr int kGroupSteps = kIntSteps / Tile::kGroups;
#pragma unroll
    for (int group = 0; group < Tile::kGroups; ++group) {
      if constexpr (Tile::kShifts) block.shifts(group, shifts);
      float sum[Tile::kAcc];
#pragma unroll
      for (int first = 0; first < kGroupSteps; first += Tile::kChunk) {
        int_chunk<Tile>(sum, block, block.zeros4(group), shifts, at, group * kGroupSteps + first, first == 0);
      }
      block.scale(acc, sum, group);
    }
  }
}

/// Likewise of groups, for more tokens than there are registers for sums: kPart of them at a time.
template <class Tile>
__device__ void int_multiply_parts(float (&acc)[Tile::kAcc], const IntBlock<Tile>& block, const std::uint8_t* x) {
  constexpr int kPart = 64;
  constexpr int kGroupSteps = kIntSteps / Tile::kGroups;
  const std::uint64_t at = int_descriptor(cute::cast_smem_ptr_to_uint(x));
#pragma unroll
  for (int group = 0; group < Tile::kGroups; ++group) {
    const IntZeros zeros = block.zeros4(group);
    std::uint32_t shifts[4] = {};
    if constexpr (Tile::kShifts) block.shifts(group, shifts);
    std::uint32_t a[kGroupSteps][4];
#pragma unroll
    for (int i = 0; i < kGroupSteps; ++i) block.fragment(group * kGroupSteps + i, zeros, a[i]);
#pragma unroll
    for (int part = 0; part < Tile::kTokens / kPart; ++part) {
      float sum[kPart / 2];
      int_products<Tile, kPart>(sum, a, shifts, at + part * (kPart * 128 / 16), group * kGroupSteps, true);
      block.template scale<kPart / 2>(acc + part * (kPart / 2), sum, group);
    }
  }
}

/// The operands x of two steps: 8 tokens × 32 columns a matrix of four.
template <class Tile>
struct IntTokens {
  const std::uint8_t* lane;  ///< of x [2][kTokens][128 B] in TMA's 128-byte swizzle, what this lane points at

  __device__ explicit IntTokens(const std::uint8_t* x) {
    const int row = static_cast<int>(threadIdx.x) % 8;
    const int piece = static_cast<int>(threadIdx.x) % 32 / 8;
    lane = x + row * 128 + (piece ^ row) * 16;
  }
  __device__ void load(int pair, int eight, std::uint32_t (&b)[4]) const {
    const auto bits = reinterpret_cast<std::uintptr_t>(lane) ^ (pair % 2 * 64);
    const auto* from = reinterpret_cast<const cute::uint128_t*>(bits + pair / 2 * (Tile::kXBytes / 2) + eight * 1024);
    cute::SM75_U32x4_LDSM_N::copy(*from, b[0], b[1], b[2], b[3]);
  }
};

__device__ inline void int_mma_warp(float* sum, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3], b0, b1, sum[0],
                                            sum[1], sum[2], sum[3]);
}

/// The block by instructions of each warp. Sums of 8 tokens take turns: a product has not to wait for the one before.
template <class Tile>
__device__ void int_multiply_warp(float (&acc)[Tile::kAcc], const IntBlock<Tile>& block, const std::uint8_t* x) {
  constexpr int kGroupPairs = kIntSteps / 2 / IntBlock<Tile>::kGroups;
  constexpr int kChains = Tile::kTokens == 8 ? 2 : 1;
  const IntTokens<Tile> tokens(x);
#pragma unroll
  for (int group = 0; group < IntBlock<Tile>::kGroups; ++group) {
    float sums[kChains][Tile::kAcc] = {};
    std::uint32_t shifts[4];
    if constexpr (Tile::kShifts) block.shifts(group, shifts);
    const IntZeros zeros = block.zeros4(group);
#pragma unroll
    for (int pair = group * kGroupPairs; pair < (group + 1) * kGroupPairs; ++pair) {
      std::uint32_t b[Tile::kTokens / 8][4];
#pragma unroll
      for (int eight = 0; eight < Tile::kTokens / 8; ++eight) tokens.load(pair, eight, b[eight]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t a[4];
        block.fragment(2 * pair + half, zeros, a);
#pragma unroll
        for (int eight = 0; eight < Tile::kTokens / 8; ++eight) {
          float* sum = sums[half % kChains] + 4 * eight;
          int_mma_warp(sum, a, b[eight][2 * half], b[eight][2 * half + 1]);
          if constexpr (Tile::kShifts) int_mma_warp(sum, shifts, b[eight][2 * half], b[eight][2 * half + 1]);
        }
      }
    }
    if constexpr (kChains == 2) {
#pragma unroll
      for (int i = 0; i < Tile::kAcc; ++i) sums[0][i] += sums[1][i];
    }
    if constexpr (Tile::kGroups > 0) {
      block.scale(acc, sums[0], group);
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kAcc; ++i) acc[i] += sums[0][i];
    }
  }
}

template <class Tile>
__device__ void int_multiply(float (&acc)[Tile::kAcc], const IntBlock<Tile>& block, const std::uint8_t* x) {
  if constexpr (Tile::kByWarps) {
    int_multiply_warp<Tile>(acc, block, x);
  } else if constexpr (Tile::kGroups > 0 && Tile::kTokens > 64) {
    int_multiply_parts<Tile>(acc, block, x);
  } else {
    int_multiply_group<Tile>(acc, block, x);
  }
}

/// The blocks of a stage, of which `left` ≥ 1 lie in the matrix.
template <class Tile>
__device__ void int_multiply_stage(float (&acc)[Tile::kAcc], const IntShared<Tile>& shared, int stage, int strip,
                                   int left) {
  const auto multiply = [&](int block) {
    int_multiply<Tile>(acc, IntBlock<Tile>(shared, stage, strip, block), shared.x(stage, block));
  };
  if (Tile::kSub == 1 || left >= Tile::kSub) {
#pragma unroll
    for (int block = 0; block < Tile::kSub; ++block) multiply(block);
  } else if constexpr (Tile::kSub <= 2) {
    multiply(0);
  } else {
#pragma unroll 1
    for (int block = 0; block < left; ++block) multiply(block);
  }
}

}  // namespace aotllm::cuda
