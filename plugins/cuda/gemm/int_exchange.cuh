#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>

#include "gemm/int_gemm.h"
#include "gemm/int_shape.cuh"

// A tile whose k is split over the CTAs of a cluster: each finishes its part of the tokens and gets the others' partial
// sums of them in its own shared memory. They are added in order of rank, which is the order of k.
namespace aotllm::cuda {

/// Of the consumer threads of a CTA that has one tile only, so that nothing here is used twice.
template <class Tile>
struct IntExchange {
  static_assert(Tile::kBlocks == 1);
  static constexpr int kGroups = Tile::kTokens / 8;  // of 8 tokens, 4 accumulators of a thread
  using Acc = float[1][Tile::kAcc];

  int cluster;  // CTAs: 2, 4 or 8
  int m;
  float* received;      // [cluster - 1 senders][groups of a CTA][4][kConsumers]
  std::uint64_t* done;  // completes when all is received

  __device__ int rank() const { return static_cast<int>(cute::block_rank_in_cluster()); }
  /// Groups of a CTA; where there are fewer groups than CTAs, the first CTAs have one each.
  __device__ int each() const { return max(1, kGroups / cluster); }
  __device__ int first() const { return min(rank() * each(), kGroups); }
  __device__ int last() const { return min(first() + each(), kGroups); }
  __device__ bool needed(int group) const { return 8 * group < m; }

  /// Where sums of group `group` (of its owner) from CTA `sender` lie.
  __device__ float* slot(int sender, int owner, int group) const {
    const int index = (sender < owner ? sender : sender - 1) * each() + group - owner * each();
    return received + index * 4 * Tile::kConsumers + threadIdx.x;
  }

  __device__ void send(const Acc& acc) const {
    const int self = rank();
    if (threadIdx.x == 0) {
      const int mine = min(last(), (m + 7) / 8) - first();
      if (mine > 0) {
        const int bytes = mine * (cluster - 1) * 4 * Tile::kConsumers * 4;
        cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(done, bytes);
      }
    }
    const std::uint32_t barrier = cute::cast_smem_ptr_to_uint(done);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int owner = group / each();
      if (owner == self || !needed(group)) continue;
      const std::uint32_t to = cute::cast_smem_ptr_to_uint(slot(self, owner, group));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        cute::store_shared_remote(__float_as_uint(acc[0][4 * group + i]), to + i * Tile::kConsumers * 4, barrier,
                                  owner);
      }
    }
  }

  /// acc of this CTA's groups = the sums over the cluster.
  __device__ void sum(Acc& acc) const {
    cutlass::arch::ClusterBarrier::wait(done, 0);
    int_compiler_fence();
    const int self = rank();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group < first() || group >= last() || !needed(group)) continue;
      float total[4] = {};
      for (int sender = 0; sender < cluster; ++sender) {
        const float* from = slot(sender, self, group);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] += sender == self ? acc[0][4 * group + i] : from[i * Tile::kConsumers];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[0][4 * group + i] = total[i];
    }
  }
};

}  // namespace aotllm::cuda
