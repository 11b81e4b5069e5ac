#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>

#include "gemm/skinny_gemm.h"
#include "gemm/skinny_shape.cuh"

// Sums on their way from accumulators to y, through shared memory. Where k of a tile is split over the CTAs of a
// cluster, each finishes its part of the tokens and gets the others' sums of them; they are added in order of rank,
// which is the order of k.
namespace aotllm::cuda {

/// [slots][groups of a slot][kConsumers] float4, a slot for each CTA that shares the tile. A thread has rows
/// lane / 4 + 8h of its warp's 16 and tokens 2 (lane % 4) + b of a group in component 2h + b of its float4. Within a
/// warp, lanes change places so that threads that read rows of several warps find them in different banks.
template <class Shape>
struct SkinnySums {
  float4* memory;
  int groups;  // of a slot

  __device__ float4* place(int slot, int group) const {
    const int thread = static_cast<int>(threadIdx.x);
    return memory + (slot * groups + group) * Shape::kConsumers + (thread ^ thread / 32 % 4 * 2);
  }

  /// Adds rows row8 … row8 + 7 of a warpgroup's 64, of token `token` of a group, to p.
  __device__ void add(float (&p)[8], int slot, int group, int warpgroup, int row8, int token) const {
    const int warp = row8 / 16;
    const float4* of_warp = memory + (slot * groups + group) * Shape::kConsumers + warpgroup * 128 + warp * 32;
    const int component = row8 % 16 / 8 * 2 + token % 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int lane = (4 * i + token / 2) ^ warp * 2;
      p[i] += reinterpret_cast<const float*>(of_warp + lane)[component];
    }
  }
};

/// Of the consumer threads of a CTA that has one tile only, so that nothing here is used twice.
template <class Shape>
struct SkinnyExchange {
  int cluster;  // CTAs: 2, 4 or 8
  int m;
  float4* memory;
  std::uint64_t* done;  // completes when all is received

  __device__ int rank() const { return static_cast<int>(cute::block_rank_in_cluster()); }
  /// Groups of a CTA; where there are fewer groups than CTAs, the first CTAs have one each.
  __device__ int each() const { return max(1, Shape::kGroups / cluster); }
  __device__ int first() const { return min(rank() * each(), Shape::kGroups); }
  __device__ int last() const { return min(first() + each(), Shape::kGroups); }
  __device__ SkinnySums<Shape> sums() const { return {memory, each()}; }

  /// Brings each group to its owner, which may be this CTA.
  __device__ void send(const float (&acc)[Shape::kAcc]) const {
    const int self = rank();
    if (threadIdx.x == 0) {
      const int mine = min(last(), (m + 7) / 8) - first();
      if (mine > 0) {
        const int bytes = mine * (cluster - 1) * Shape::kGroupBytes;
        cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(done, bytes);
      }
    }
    const std::uint32_t barrier = cute::cast_smem_ptr_to_uint(done);
    const int shift = 31 - __clz(each());  // a power of two
#pragma unroll
    for (int group = 0; group < Shape::kGroups; ++group) {
      if (8 * group >= m) break;
      const int owner = group >> shift;
      float4* to = sums().place(self, group - (owner << shift));
      const float* from = &acc[4 * group];
      if (owner == self) {
        *to = make_float4(from[0], from[1], from[2], from[3]);
      } else {
        store_remote(to, from, barrier, owner);
      }
    }
  }

  __device__ void wait() const {
    cutlass::arch::ClusterBarrier::wait(done, 0);
    skinny_compiler_fence();
  }

 private:
  /// Each store counts against the barrier by itself, so four words go together.
  __device__ static void store_remote(float4* to, const float* from, std::uint32_t barrier, int owner) {
    const std::uint32_t there = cute::set_block_rank(cute::cast_smem_ptr_to_uint(to), owner);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :
                 : "r"(there), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]),
                   "r"(cute::set_block_rank(barrier, owner))
                 : "memory");
  }
};

}  // namespace aotllm::cuda
