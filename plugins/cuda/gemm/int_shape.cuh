#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/mma_sm90_gmma.hpp>

#include "gemm/int_gemm.h"

namespace aotllm::cuda {
namespace integer {
namespace gmma = cute::SM90::GMMA;
constexpr gmma::Major kMajor = gmma::Major::K;
}  // namespace integer

/// 64 rows of W, from registers, × kTokens × 16 columns.
template <int kTokens>
struct IntMma;
template <>
struct IntMma<32> : integer::gmma::MMA_64x32x16_F32BF16BF16_RS<integer::kMajor, integer::kMajor> {};
template <>
struct IntMma<64> : integer::gmma::MMA_64x64x16_F32BF16BF16_RS<integer::kMajor, integer::kMajor> {};
template <>
struct IntMma<128> : integer::gmma::MMA_64x128x16_F32BF16BF16_RS<integer::kMajor, integer::kMajor> {};

/// Tile of kRows rows of W × kTokens tokens, a warpgroup for each 64 rows. A stage of the ring is kSub blocks of 128
/// columns: codes [kRows / 64][kSub], then X [2 kSub][kTokens][128 B] in TMA's 128-byte swizzle, then scales
/// [kRows / 64][kSub][kGroups][64] and zeros likewise.
template <IntFormat kFormat_, int kTokens_, int kRows_, int kSub_>
struct IntTile {
  static constexpr IntFormat kFormat = kFormat_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kRows = kRows_;
  static constexpr int kSub = kSub_;
  static constexpr bool kFour = int_has_four_bits(kFormat);
  static constexpr int kGroups = int_groups(kFormat);
  static constexpr bool kShifts = kFormat == IntFormat::kInt8Group32;  ///< 128 − zero is an operand of its own

  static constexpr int kWarpgroups = kRows / 64;
  static constexpr int kBlocks = 1;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kThreads = kConsumers + 32;  ///< and the producer's warp
  static constexpr int kAcc = kTokens / 2;
  /// CTAs of a multiprocessor, as registers allow: one of them is that of the kernel that follows.
  static constexpr int kResident = kTokens >= 64 ? 1 : kTokens == 32 || kGroups == 4 ? 2 : kRows == 64 ? 5 : 3;
  static constexpr bool kByWarps = kTokens <= 16;  ///< see int_multiply.cuh
  /// Steps of 16 columns that a warpgroup makes ready at a time: as many as registers allow, none beyond a group.
  static constexpr int kChunk = kGroups == 4 ? 2 : 4;

  static constexpr int kCodeBytes = int_block_bytes(kFormat);
  static constexpr int kXBytes = 2 * kTokens * 128;  ///< of a block's columns
  static constexpr int kScaleBytes = kGroups * kIntRows * 4;
  static constexpr int kZeroBytes = kGroups * kIntRows;
  static constexpr int kXOffset = kWarpgroups * kSub * kCodeBytes;
  static constexpr int kScaleOffset = kXOffset + kSub * kXBytes;
  static constexpr int kZeroOffset = kScaleOffset + kWarpgroups * kSub * kScaleBytes;
  static constexpr int kStageBytes = (kZeroOffset + kWarpgroups * kSub * kZeroBytes + 1023) / 1024 * 1024;

  static constexpr int kMaxStages = kIntMaxStages;
  static constexpr int kFixedBytes = 2 * kMaxStages * 8 + 8 + 16;  ///< full, empty, exchanged; flags of the merges
  static constexpr int kPartialBytes = kRows * kTokens * 4;
};

/// A CTA's shared memory: the ring, then what kFixedBytes counts, then what IntExchange receives.
template <class Tile>
struct IntShared {
  std::uint8_t* ring;
  int stages;

  __device__ std::uint8_t* stage(int i) const { return ring + i * Tile::kStageBytes; }
  __device__ std::uint8_t* codes(int i, int strip) const { return stage(i) + strip * Tile::kSub * Tile::kCodeBytes; }
  __device__ std::uint8_t* x(int i, int block) const { return stage(i) + Tile::kXOffset + block * Tile::kXBytes; }
  __device__ float* scales(int i, int strip) const {
    return reinterpret_cast<float*>(stage(i) + Tile::kScaleOffset + strip * Tile::kSub * Tile::kScaleBytes);
  }
  __device__ std::uint8_t* zeros(int i, int strip) const {
    return stage(i) + Tile::kZeroOffset + strip * Tile::kSub * Tile::kZeroBytes;
  }
  __device__ std::uint8_t* fixed() const { return stage(stages); }
  __device__ std::uint64_t* full(int i) const { return reinterpret_cast<std::uint64_t*>(fixed()) + i; }
  __device__ std::uint64_t* empty(int i) const { return full(Tile::kMaxStages + i); }
  __device__ std::uint64_t* exchanged() const { return full(2 * Tile::kMaxStages); }
  __device__ int* flags() const { return reinterpret_cast<int*>(exchanged() + 1); }
  __device__ float* exchange() const { return reinterpret_cast<float*>(fixed() + Tile::kFixedBytes); }
};

/// Descriptor of a K-major operand with 128-byte swizzle whose first row is at `address` (1024-byte aligned): groups of
/// 8 rows are 1024 bytes apart. 32 bytes further along k is + 2.
__device__ inline std::uint64_t int_descriptor(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3FFFF) >> 4) | (std::uint64_t{1024 >> 4} << 32) |
         (std::uint64_t{1} << 62);
}

/// Keeps the compiler from moving memory accesses: CUTLASS's barriers only order themselves.
__device__ inline void int_compiler_fence() {
  asm volatile("" ::: "memory");
}

/// A named barrier of `threads` threads that also orders their accesses to shared memory.
__device__ inline void int_sync(int threads, int barrier) {
  int_compiler_fence();
  cutlass::arch::NamedBarrier::sync(static_cast<std::uint32_t>(threads), static_cast<std::uint32_t>(barrier));
  int_compiler_fence();
}

}  // namespace aotllm::cuda
