#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "moe/moe_gemm_consumer.cuh"
#include "moe/moe_gemm_producer.cuh"

// y = f(W_e · x) for the places of each expert, tile by tile: a persistent grid whose CTAs stream W and gathered rows
// of X through a ring in shared memory.
namespace aotllm::cuda::moe {

template <class S>
__device__ void initialize_barriers(const Shared<S>& shared) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::kStages; ++stage) {
      ClusterBarrier::init(&shared.full[stage], 1 + S::kProducers);
      ClusterBarrier::init(&shared.empty[stage], S::kConsumers / 32 * S::kCluster);
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (S::kCluster == 1) {
    __syncthreads();
  } else {
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}

/// The successor may start once all CTAs know that the routing is there: what it reads of it is then there too.
template <class S>
__global__ void __cluster_dims__(S::kCluster, 1, 1) __launch_bounds__(S::kThreads, S::kResident)
    moe_gemm_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ MoeGemmArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::uint8_t raw[];
  const Shared<S> shared(raw);
  initialize_barriers(shared);
  if (threadIdx.x >= S::kConsumers) {
    if constexpr (S::kLarge) cutlass::arch::warpgroup_reg_dealloc<56>();
    if (!S::kIntegers && threadIdx.x == S::kConsumers) cute::prefetch_tma_descriptor(&w_map);
    Producer<S>(w_map, args, shared).run();
  } else {
    if constexpr (S::kLarge) cutlass::arch::warpgroup_reg_alloc<224>();
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
    Consumer<S>(args, shared).run();
  }
  if constexpr (S::kCluster > 1) cute::cluster_sync();  // others may still write to this CTA's memory and barriers
#endif
}

template <class S>
MoeGemmKernel described() {
  return {moe_gemm_kernel<S>, S::kThreads, S::kSharedBytes, S::kRows, S::kCluster};
}

template <bool kFp8>
MoeGemmKernel moe_gemm_kernel_of(int tokens) {
  switch (tokens) {
    case 8:
      return described<Shape<kFp8, 8>>();
    case 16:
      return described<Shape<kFp8, 16>>();
    case 32:
      return described<Shape<kFp8, 32>>();
    case 64:
      return described<Shape<kFp8, 64>>();
    case 128:
      return described<Shape<kFp8, 128>>();
    case 160:
      return described<Shape<kFp8, 160>>();
    default:
      break;
  }
  if constexpr (!kFp8) {
    if (tokens == 192) return described<Shape<kFp8, 192>>();
    if (tokens == 320) return described<Shape<kFp8, 160, 2>>();
    if (tokens == 384) return described<Shape<kFp8, 192, 2>>();
  }
  return {};
}

template <IntFormat kFormat>
MoeGemmKernel moe_gemm_kernel_of(int tokens) {
  // Rows of a tile of 128 tokens: as many as registers allow.
  constexpr int kWide = kFormat == IntFormat::kInt8Group32 ? 128 : 256;
  constexpr int kDeep = kFormat == IntFormat::kInt4Group128 ? 4 : 2;  // blocks of a stage for few tokens
  switch (tokens) {
    case 8:
      return described<IntegerShape<kFormat, 8, 64, kDeep, 2>>();
    case 16:
      return described<IntegerShape<kFormat, 16, 64, kDeep, 2>>();
    case 32:
      return described<IntegerShape<kFormat, 32, 128, 1, 2>>();
    case 64:
      return described<IntegerShape<kFormat, 64, 256, 1, 1, 2>>();
    case 128:
      return described<IntegerShape<kFormat, 128, kWide, 1, 1, kWide / 128>>();
    default:
      return {};
  }
}

}  // namespace aotllm::cuda::moe
