#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "gemm/skinny_gemm.h"

namespace aotllm::cuda {

/// The tensor core instruction of 64 rows of W × kTokens × 32 bytes of k, both operands in shared memory.
template <bool kBf16, int kTokens>
struct SkinnyMma;
namespace skinny {
namespace gmma = cute::SM90::GMMA;
constexpr gmma::Major kMajor = gmma::Major::K;
}  // namespace skinny
template <>
struct SkinnyMma<true, 8> : skinny::gmma::MMA_64x8x16_F32BF16BF16_SS<skinny::kMajor, skinny::kMajor> {};
template <>
struct SkinnyMma<true, 16> : skinny::gmma::MMA_64x16x16_F32BF16BF16_SS<skinny::kMajor, skinny::kMajor> {};
template <>
struct SkinnyMma<true, 32> : skinny::gmma::MMA_64x32x16_F32BF16BF16_SS<skinny::kMajor, skinny::kMajor> {};
template <>
struct SkinnyMma<true, 64> : skinny::gmma::MMA_64x64x16_F32BF16BF16_SS<skinny::kMajor, skinny::kMajor> {};
template <>
struct SkinnyMma<false, 8> : skinny::gmma::MMA_64x8x32_F32E4M3E4M3_SS_TN<> {};
template <>
struct SkinnyMma<false, 16> : skinny::gmma::MMA_64x16x32_F32E4M3E4M3_SS_TN<> {};
template <>
struct SkinnyMma<false, 32> : skinny::gmma::MMA_64x32x32_F32E4M3E4M3_SS_TN<> {};
template <>
struct SkinnyMma<false, 64> : skinny::gmma::MMA_64x64x32_F32E4M3E4M3_SS_TN<> {};

/// Tile of kRows rows of W × kTokens tokens. A stage of the ring is kSub columns of 128 bytes: W [kSub][kRows][128 B],
/// then X [kSub][kTokens][128 B], both as TMA's 128-byte swizzle leaves them.
template <WeightType kType_, int kTokens_, int kRows_, int kSub_, SkinnyRole kRole_ = SkinnyRole{}>
struct SkinnyShape {
  static constexpr WeightType kType = kType_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kRows = kRows_;
  static constexpr int kSub = kSub_;
  static constexpr SkinnyRole kRole = kRole_;
  static constexpr bool kBf16 = kType == WeightType::kBf16;
  static constexpr int kColumn = kBf16 ? 64 : 128;  ///< elements of k in 128 bytes
  using Mma = SkinnyMma<kBf16, kTokens>;

  static constexpr int kWarpgroups = kRows / 64;  ///< 64 rows each
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kThreads = kConsumers + 32;  ///< and the producer's warp
  static constexpr int kAcc = kTokens / 2;          ///< accumulators of a thread

  static constexpr int kGroups = kTokens / 8;  ///< of 8 tokens: 4 accumulators each

  static constexpr int kWBytes = kRows * 128;
  static constexpr int kXBytes = kTokens * 128;
  static constexpr int kStageBytes = kSub * (kWBytes + kXBytes);

  static constexpr bool kChained = kRole.chained;
  static constexpr int kStageScales = kChained ? kSub * 128 / kCodeGroup * kTokens : 0;  ///< of X, beside the ring
  static constexpr int kStageScaleBytes = kStageScales * 4;

  static constexpr int kScaleChunk = 8;             ///< columns whose scales are staged at a time (kFp8Block)
  static constexpr int kScaleStride = kTokens + 2;  ///< spreads the banks, keeps float2 aligned
  static constexpr int kScaleFloats = kType == WeightType::kFp8Block ? kScaleChunk * kScaleStride : 0;

  static constexpr int kMaxStages = kSkinnyMaxStages;
  static constexpr int kBarrierBytes = 2 * kMaxStages * 8 + 16 + 16;  ///< full, empty, exchanged; flags of the merges
  static constexpr bool kScaled = kType == WeightType::kFp8;          ///< by row of W and of X
  /// Bias; scales of rows and of tokens. In chains: weights of the next norm, and squares by warp.
  static constexpr int kFactors =
      kRows + (kScaled ? kRows + kTokens : 0) + (kChained ? kRows + (kConsumers / 32 - 1) * kTokens : 0);
  static constexpr int kFixedBytes = kBarrierBytes + (kWarpgroups * kScaleFloats + kFactors) * 4;
  static constexpr int kPiece = kGroups < 2 ? 1 : 2;  ///< groups of a whole tile that are finished at a time
  static constexpr int kGroupBytes = 8 * kRows * 4;   ///< sums of a group
  static constexpr int kPartialBytes = kRows * kTokens * 4;
};

/// Descriptor of a K-major operand with 128-byte swizzle whose first row is at `address` (1024-byte aligned): groups of
/// 8 rows are 1024 bytes apart. 32 bytes further along k is + 2.
__device__ inline std::uint64_t skinny_descriptor(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3FFFF) >> 4) | (std::uint64_t{1024 >> 4} << 32) |
         (std::uint64_t{1} << 62);
}

template <class Mma, std::size_t... kIndex>
__device__ inline void skinny_mma(std::uint64_t w, std::uint64_t x, float* acc, skinny::gmma::ScaleOut scale,
                                  std::index_sequence<kIndex...>) {
  Mma::fma(w, x, acc[kIndex]..., scale);
}

/// Keeps the compiler from moving memory accesses: CUTLASS's barriers only order themselves.
__device__ inline void skinny_compiler_fence() {
  asm volatile("" ::: "memory");
}

/// A named barrier of `threads` threads that also orders their accesses to shared memory.
__device__ inline void skinny_sync(int threads, int barrier) {
  skinny_compiler_fence();
  cutlass::arch::NamedBarrier::sync(static_cast<std::uint32_t>(threads), static_cast<std::uint32_t>(barrier));
  skinny_compiler_fence();
}

}  // namespace aotllm::cuda
