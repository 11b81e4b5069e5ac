#pragma once

#include <cooperative_groups.h>

namespace aotllm::cuda {

/// The blocks that share a row: a cluster, which there is from SM90 on, or a single one.
template <int kBlocks>
struct Team {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __device__ static int block_rank() { return static_cast<int>(cooperative_groups::this_cluster().block_rank()); }
  __device__ static void arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
  __device__ static void wait() { cooperative_groups::this_cluster().barrier_wait(); }
  __device__ static void sync() { cooperative_groups::this_cluster().sync(); }
  /// What stands at `address` of this block, in block `rank`.
  template <class T>
  __device__ static T* map_shared_rank(T* address, int rank) {
    return cooperative_groups::this_cluster().map_shared_rank(address, rank);
  }
#else  // never launched
  __device__ static int block_rank() { return 0; }
  __device__ static void arrive() { __trap(); }
  __device__ static void wait() {}
  __device__ static void sync() {}
  template <class T>
  __device__ static T* map_shared_rank(T* address, int /*rank*/) {
    return address;
  }
#endif
};
template <>
struct Team<1> {
  __device__ static int block_rank() { return 0; }
  __device__ static void arrive() {}
  __device__ static void wait() {}
  __device__ static void sync() { __syncthreads(); }
  template <class T>
  __device__ static T* map_shared_rank(T* address, int /*rank*/) {
    return address;
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define AOTLLM_BLOCKS_OF_ROW(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define AOTLLM_BLOCKS_OF_ROW(blocks)
#endif

}  // namespace aotllm::cuda
