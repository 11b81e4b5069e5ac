#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/int_shape.cuh"

namespace aotllm::cuda {

/// Contiguous bytes (a multiple of 16) to shared memory.
__device__ inline void int_copy(void* to, const void* from, int bytes, std::uint64_t* barrier,
                                cute::TMA::CacheHintSm90 hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::
          "r"(cute::cast_smem_ptr_to_uint(to)),
      "l"(from), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier)), "l"(static_cast<std::uint64_t>(hint))
      : "memory");
}

/// What a stage of the ring holds of W: of each of a tile's strips kSub blocks, fewer at the end of k.
template <class Tile>
struct IntLoad {
  static constexpr int kBlockBytes = Tile::kCodeBytes + Tile::kScaleBytes + Tile::kZeroBytes;

  const IntBlocks& w;
  std::size_t first;  ///< block of the first strip
  int count;          ///< blocks of a strip
  int strips;

  /// Of the tile whose first strip is `strip`, in the matrix whose first strip in memory is `base`.
  __device__ IntLoad(const IntBlocks& w, int base, int strip, int step)
      : w(w),
        first(static_cast<std::size_t>(base + strip) * w.k_blocks + step * Tile::kSub),
        count(min(Tile::kSub, w.k_blocks - step * Tile::kSub)),
        strips(min(Tile::kWarpgroups, w.strips - strip)) {}

  /// Bytes that start() brings.
  __device__ int bytes() const { return strips * count * kBlockBytes; }

  __device__ void start(const IntShared<Tile>& shared, int stage, std::uint64_t* full,
                        cute::TMA::CacheHintSm90 hint) const {
    for (int strip = 0; strip < strips; ++strip) {
      const std::size_t block = first + static_cast<std::size_t>(strip) * w.k_blocks;
      int_copy(shared.codes(stage, strip), w.codes + block * Tile::kCodeBytes, count * Tile::kCodeBytes, full, hint);
      if constexpr (Tile::kGroups > 0) {
        int_copy(shared.scales(stage, strip), w.scales + block * (Tile::kScaleBytes / 4), count * Tile::kScaleBytes,
                 full, hint);
        int_copy(shared.zeros(stage, strip), w.zeros + block * Tile::kZeroBytes, count * Tile::kZeroBytes, full, hint);
      }
    }
  }

  /// Codes to the L2.
  __device__ void prefetch() const {
    for (int strip = 0; strip < strips; ++strip) {
      const std::size_t block = first + static_cast<std::size_t>(strip) * w.k_blocks;
      cute::SM90_BULK_COPY_G2S::PREFETCH::copy(w.codes + block * Tile::kCodeBytes, count * Tile::kCodeBytes);
    }
  }
};

}  // namespace aotllm::cuda
