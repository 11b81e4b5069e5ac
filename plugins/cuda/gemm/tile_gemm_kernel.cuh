#pragma once

#define CUTLASS_ENABLE_GDC_FOR_SM90
#include <cutlass/arch/grid_dependency_control.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/tile_gemm_config.cuh"
#include "gemm/tile_gemm_consumer.cuh"

// y = f(x · Wᵀ), tile by tile. One warp streams blocks of x and W, 128 bytes along k, through a ring in shared memory;
// two warpgroups multiply them. Clusters of CTAs share blocks of W (TMA multicast) or sums.
namespace aotllm::cuda::tile {

/// The one thread that loads. CTAs that share a block of W load a part of it each and send it to all.
template <class C>
struct Loader {
  const TileParams& p;
  const Shared<C>& shared;
  const Walk<C>& walk;

  __device__ void expect(int stage) const {
    ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full[stage], C::kStageBytes);
  }
  __device__ void load_x(int stage, int block, int row) const {
    std::uint8_t* to = shared.ring + stage * C::kStageBytes;
    cute::SM90_TMA_LOAD_2D::copy(&p.x_map, &shared.full[stage], p.x_hint, to, k(block), row);
  }
  __device__ void load_w(int stage, int block, int column) const {
    constexpr int kPart = C::kColumns / C::kClusterM;
    std::uint8_t* to = shared.ring + stage * C::kStageBytes + C::kXBytes + walk.rank_m * kPart * kBlockBytes;
    if constexpr (C::kClusterM == 1) {
      cute::SM90_TMA_LOAD_2D::copy(&p.w_map, &shared.full[stage], p.w_hint, to, k(block), column);
    } else {
      constexpr std::uint16_t kAll = (1 << C::kClusterM) - 1;
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&p.w_map, &shared.full[stage], kAll, p.w_hint, to, k(block),
                                             column + walk.rank_m * kPart);
    }
  }
  /// 64 columns of a tile's residuals: as large as a block of x, and swizzled like one.
  __device__ void load_residual(int stage, int row, int column) const {
    constexpr auto kHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    std::uint8_t* to = shared.ring + stage * C::kStageBytes;
    ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full[stage], C::kXBytes);
    cute::SM90_TMA_LOAD_2D::copy(&p.residual_map, &shared.full[stage], kHint, to, column, row);
  }

 private:
  __device__ int k(int block) const { return (walk.first_block + block) * C::kBlockK; }
};

/// Fills the ring with the blocks of all tiles, and behind those of a tile with its residuals. The weights of the first
/// blocks are under way before the predecessor ends.
template <class C>
__device__ void produce(const TileParams& p, const Shared<C>& shared) {
  Walk<C> walk(p);
  const Loader<C> loader{p, shared, walk};
  RingPosition<C::kStages> at;
  int early = 0;
  if (walk.more()) {
    early = min(C::kStages, walk.num_blocks);
    const int2 origin = walk.origin(p);
    for (int i = 0; i < early; ++i) {
      loader.expect(i);
      loader.load_w(i, i, origin.y);
    }
  }
  cutlass::arch::wait_on_dependent_grids();
  for (; walk.more(); walk.next()) {
    const int2 origin = walk.origin(p);
    for (int block = 0; block < walk.num_blocks; ++block) {
      if (block >= early) {
        ClusterBarrier::wait(&shared.empty[at.stage], at.phase ^ 1);
        loader.expect(at.stage);
        loader.load_w(at.stage, block, origin.y);
      }
      loader.load_x(at.stage, block, origin.x);
      at.advance();
    }
    early = 0;
    if constexpr (C::kSplits == 1) {
      if (p.epilogue != Epilogue::kResidual) continue;
      for (int column = 0; column < C::kColumns; column += 64) {
        ClusterBarrier::wait(&shared.empty[at.stage], at.phase ^ 1);
        loader.load_residual(at.stage, origin.x, origin.y + column);
        at.advance();
      }
    }
  }
}

template <class C>
__device__ void initialize_barriers(const Shared<C>& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      ClusterBarrier::init(&shared.full[i], 1);
      ClusterBarrier::init(&shared.empty[i], 2 * C::kClusterM);  // warpgroups of all CTAs that read what this one loads
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (C::kCtas == 1) {
    __syncthreads();
  } else {
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}

template <class C>
__global__ void __cluster_dims__(C::kCtas, 1, 1) __launch_bounds__(kThreads, 1)
    tile_gemm_kernel(const __grid_constant__ TileParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::uint8_t raw[];
  const Shared<C> shared(raw);
  initialize_barriers<C>(shared);
  cutlass::arch::launch_dependent_grids();
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) {
      produce<C>(p, shared);
    } else {
      cutlass::arch::wait_on_dependent_grids();
    }
    __syncwarp();
    if constexpr (C::kSplits > 1) cute::cluster_sync();  // the one of add_splits
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    cutlass::arch::wait_on_dependent_grids();
    Consumer<C>(p, shared).run();
  }
  if constexpr (C::kCtas > 1) cute::cluster_sync();  // others may still write to this CTA's barriers, or read its sums
#endif
}

/// The kernel of Config C as the host side sees it.
template <class C>
TileKernel tile_kernel() {
  return {tile_gemm_kernel<C>, kThreads, C::kSharedBytes};
}

}  // namespace aotllm::cuda::tile
