#pragma once

#include "attention/decode_params.cuh"
//
#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>

// Where a launch has little work, the CTAs of a query's ranges are a cluster, and the first of them combines the ranges
// in its shared memory: the same sums in the same order as combine_ranges makes of the workspace.
namespace aotllm::cuda {

__device__ inline void add_scaled(float4& sum, float factor, const float4& value) {
  sum.x = __fmaf_rn(factor, value.x, sum.x);
  sum.y = __fmaf_rn(factor, value.y, sum.y);
  sum.z = __fmaf_rn(factor, value.z, sum.z);
  sum.w = __fmaf_rn(factor, value.w, sum.w);
}
__device__ inline float4 scaled(const float4& value, float factor) {
  return {__fmul_rn(value.x, factor), __fmul_rn(value.y, factor), __fmul_rn(value.z, factor),
          __fmul_rn(value.w, factor)};
}

__device__ inline void store_async(std::uint32_t to, std::uint32_t barrier, const float4& value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               :
               : "r"(to), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
               : "memory");
}
__device__ inline void store_async(std::uint32_t to, std::uint32_t barrier, const float2& value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
               :
               : "r"(to), "f"(value.x), "f"(value.y), "r"(barrier)
               : "memory");
}

/// Results of ranges in the shared memory of the cluster's first CTA, which has range 0.
template <class Tile>
class DecodeCluster {
 public:
  static constexpr int part_bytes(int heads) { return heads * (Tile::kHeadDim * 4 + 8); }

  __device__ DecodeCluster(const DecodeParams& params, std::uint8_t* shared, const DecodeStorage& storage)
      : heads_(params.tile_heads),
        parts_(shared + storage.parts),
        all_here_(DecodeBarriers{reinterpret_cast<std::uint64_t*>(shared + storage.barriers)}.parts(params.stages)) {}

  /// By all consumer threads, after the barriers of the first CTA are known to be made: what is to come.
  __device__ void begin(const DecodeStageInfo& info) const {
    if (info.range > 0) {
      cute::cluster_wait();
    } else if (threadIdx.x == 0) {
      cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(
          all_here_, static_cast<std::uint32_t>((info.ranges - 1) * part_bytes(info.heads)));
    }
  }
  /// Four dims of a head of this CTA's range; `stats` (maximum and sum) with its first.
  __device__ void put(int range, int head, int dim, const float4& value, const float2& stats) const {
    if (range == 0) {
      *reinterpret_cast<float4*>(value_of(0, head, dim)) = value;
      if (dim == 0) *stats_of(0, head) = stats;
      return;
    }
    const std::uint32_t barrier = first_cta(all_here_);
    store_async(first_cta(value_of(range, head, dim)), barrier, value);
    if (dim == 0) store_async(first_cta(stats_of(range, head)), barrier, stats);
  }
  /// By threads of the first CTA, which have seen its own part: all are there.
  __device__ void wait() const { cutlass::arch::ClusterBarrier::wait(all_here_, 0); }

  __device__ float4 combine(int ranges, int head, int dim) const {
    float2 stats[kDecodeMaxCluster];
    float maximum = -INFINITY;
#pragma unroll
    for (int r = 0; r < kDecodeMaxCluster; ++r) {
      stats[r] = r < ranges ? *stats_of(r, head) : float2{-INFINITY, 0.0f};
      maximum = fmaxf(maximum, stats[r].x);
    }
    float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
    float sums[kDecodeMaxCluster];
#pragma unroll
    for (int r = 0; r < kDecodeMaxCluster; ++r) {
      const float factor = exp2f(stats[r].x - maximum);
      sums[r] = __fmul_rn(factor, stats[r].y);
      if (r < ranges) add_scaled(value, factor, *reinterpret_cast<const float4*>(value_of(r, head, dim)));
    }
#pragma unroll
    for (int step = 1; step < kDecodeMaxCluster; step *= 2) {
#pragma unroll
      for (int r = 0; r < kDecodeMaxCluster; r += 2 * step) sums[r] = __fadd_rn(sums[r], sums[r + step]);
    }
    return scaled(value, __frcp_rn(sums[0]));
  }

 private:
  __device__ float* value_of(int range, int head, int dim) const {
    return reinterpret_cast<float*>(parts_) + (range * heads_ + head) * Tile::kHeadDim + dim;
  }
  __device__ float2* stats_of(int range, int head) const {
    float* stats = value_of(kDecodeMaxCluster, 0, 0);
    return reinterpret_cast<float2*>(stats) + range * heads_ + head;
  }
  __device__ static std::uint32_t first_cta(const void* address) {
    return cute::set_block_rank(static_cast<std::uint32_t>(__cvta_generic_to_shared(address)), 0);
  }

  int heads_;
  std::uint8_t* parts_;
  std::uint64_t* all_here_;
};

}  // namespace aotllm::cuda
