#pragma once

#include "gemm/int_gemm.h"
#include "gemm/int_shape.cuh"

// A tile that several CTAs share: each leaves its partial sums in the workspace, the last to arrive adds them all in
// order of k, so that the result does not depend on who that was.
namespace aotllm::cuda {

/// Of the CTA's consumer threads. `flags` are two words of shared memory that no other merge of the CTA uses.
template <class Tile>
struct IntMerge {
  static constexpr int kBarrier = 0;                                 // named barrier of all consumers
  static constexpr int kGroups = Tile::kBlocks * Tile::kTokens / 8;  // float4 of a thread
  using Acc = float[Tile::kBlocks][Tile::kAcc];

  const IntArgs& args;
  int tile;
  int m;
  volatile int* flags;

  __device__ int first() const { return args.split.owner(tile * args.split.per_tile); }
  __device__ int last() const { return args.split.owner((tile + 1) * args.split.per_tile - 1); }

  /// Where a CTA leaves its share of this tile: a CTA shares at most its first tile and its last one.
  __device__ float4* slot(int cta) const {
    const bool later = args.split.begin(cta) < tile * args.split.per_tile;
    return args.partials + static_cast<std::size_t>(2 * cta + later) * (Tile::kPartialBytes / 16) + threadIdx.x;
  }

  /// Whether group g belongs to tokens below m.
  __device__ bool needed(int g) const { return 8 * (g % (Tile::kTokens / 8)) < m; }

  /// True for the last CTA to arrive: the others' partial sums are there, and its own need not be written where that
  /// is known before.
  __device__ bool arrive(const Acc& acc) const {
    const int others = last() - first();
    unsigned* counter = args.counters + tile;
    if (threadIdx.x == 0) flags[0] = static_cast<int>(atomicAdd(counter, 0));
    sync();
    if (flags[0] != others) {
      float4* to = slot(static_cast<int>(blockIdx.x));
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (needed(g)) __stcg(to + g * Tile::kConsumers, group(acc, g));
      }
      sync();
      if (threadIdx.x == 0) {
        __threadfence();
        flags[1] = static_cast<int>(atomicAdd(counter, 1));
      }
      sync();
      if (flags[1] != others) return false;
    }
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
    return true;
  }

  /// acc = the sum of all shares in order of k.
  __device__ void sum(Acc& acc) const {
    constexpr int kLoads = kGroups < 8 ? 8 : 4;  // in flight; registers are few where acc is large
    constexpr int kTogether = kGroups < kLoads / 2 ? kGroups : kLoads / 2;
    constexpr int kFlight = kLoads / kTogether;  // shares
    const int from = first();
    const int to = last();
#pragma unroll
    for (int g = 0; g < kGroups; g += kTogether) {
      if (!needed(g)) continue;
      float4 total[kTogether] = {};
      for (int begin = from; begin <= to; begin += kFlight) {
        float4 share[kFlight][kTogether];
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
          const int cta = begin + i;
          const bool other = cta <= to && cta != static_cast<int>(blockIdx.x);
          const float4* partial = slot(cta);
#pragma unroll
          for (int t = 0; t < kTogether; ++t) {
            share[i][t] = group(acc, g + t);
            if (other && needed(g + t)) share[i][t] = __ldcg(partial + (g + t) * Tile::kConsumers);
          }
        }
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
          if (begin + i > to) break;
#pragma unroll
          for (int t = 0; t < kTogether; ++t) add(total[t], share[i][t]);
        }
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) set(acc, g + t, total[t]);
    }
  }

 private:
  __device__ static void sync() { int_sync(Tile::kConsumers, kBarrier); }

  __device__ static float4 group(const Acc& acc, int g) {
    const float* from = &acc[g / (Tile::kTokens / 8)][4 * (g % (Tile::kTokens / 8))];
    return make_float4(from[0], from[1], from[2], from[3]);
  }
  __device__ static void set(Acc& acc, int g, float4 value) {
    float* to = &acc[g / (Tile::kTokens / 8)][4 * (g % (Tile::kTokens / 8))];
    to[0] = value.x, to[1] = value.y, to[2] = value.z, to[3] = value.w;
  }
  __device__ static void add(float4& total, const float4& value) {
    total.x += value.x, total.y += value.y, total.z += value.z, total.w += value.w;
  }
};

}  // namespace aotllm::cuda
