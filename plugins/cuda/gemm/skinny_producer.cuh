#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/skinny_gemm.h"
#include "gemm/skinny_shape.cuh"

// What streams W and X: the ring in shared memory and the thread that fills it.
namespace aotllm::cuda {

using SkinnyBarrier = cutlass::arch::ClusterTransactionBarrier;

/// Shared memory: the ring, in chains its scales, then barriers, the flags of two merges, the staged scales
/// (kFp8Block), what the epilogue multiplies and adds, and sums on their way to y.
template <class Shape>
struct SkinnyShared {
  std::uint8_t* ring;
  int stages;

  __device__ std::uint8_t* w(int stage, int sub) const {
    return ring + stage * Shape::kStageBytes + sub * Shape::kWBytes;
  }
  __device__ std::uint8_t* x(int stage, int sub) const {
    return ring + stage * Shape::kStageBytes + Shape::kSub * Shape::kWBytes + sub * Shape::kXBytes;
  }
  /// Of X in groups, [group][kTokens].
  __device__ float* group_scales(int stage) const {
    return reinterpret_cast<float*>(ring + stages * Shape::kStageBytes) + stage * Shape::kStageScales;
  }
  __device__ std::uint8_t* fixed() const { return reinterpret_cast<std::uint8_t*>(group_scales(stages)); }
  __device__ std::uint64_t* full(int stage) const { return reinterpret_cast<std::uint64_t*>(fixed()) + stage; }
  __device__ std::uint64_t* empty(int stage) const { return full(Shape::kMaxStages + stage); }
  __device__ std::uint64_t* exchanged() const { return full(2 * Shape::kMaxStages); }
  __device__ int* flags() const { return reinterpret_cast<int*>(exchanged() + 1); }
  __device__ float* scales(int warpgroup) const {
    return reinterpret_cast<float*>(fixed() + Shape::kBarrierBytes) + warpgroup * Shape::kScaleFloats;
  }
  __device__ float* factors() const { return scales(Shape::kWarpgroups); }
  __device__ float4* sums() const { return reinterpret_cast<float4*>(factors() + Shape::kFactors); }
};

/// Position in the ring, and how often it has been passed (its parity).
struct SkinnyRing {
  int stage = 0;
  unsigned parity = 0;

  __device__ void next(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// The unit at which the producer is: its tile and its stage along k.
struct SkinnyCursor {
  int tile;
  int step;

  __device__ SkinnyCursor(const SkinnySplit& split, int unit)
      : tile(unit / split.per_tile), step(unit - tile * split.per_tile) {}
  __device__ void next(const SkinnySplit& split) {
    if (++step == split.per_tile) {
      step = 0;
      ++tile;
    }
  }
};

/// One thread: all loads of units [begin, end).
template <class Shape>
struct SkinnyProducer {
  const CUtensorMap* w_map;
  const CUtensorMap* x_map;
  const SkinnyArgs& args;
  SkinnyShared<Shape> shared;

  __device__ void load_w(const SkinnyCursor& at, int stage) const {
    SkinnyBarrier::arrive_and_expect_tx(shared.full(stage), Shape::kStageBytes + Shape::kStageScaleBytes);
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
      cute::SM90_TMA_LOAD_2D::copy(
          w_map, shared.full(stage), static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
          shared.w(stage, sub), (at.step * Shape::kSub + sub) * Shape::kColumn, at.tile * Shape::kRows);
    }
  }

  __device__ void load_x(const SkinnyCursor& at, int stage) const {
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
      cute::SM90_TMA_LOAD_2D::copy(x_map, shared.full(stage),
                                   static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   shared.x(stage, sub), (at.step * Shape::kSub + sub) * Shape::kColumn, 0);
    }
    if constexpr (Shape::kChained) {
      cute::SM90_BULK_COPY_G2S::copy(args.x_scales + at.step * Shape::kStageScales, shared.full(stage),
                                     shared.group_scales(stage), Shape::kStageScaleBytes);
    }
  }

  __device__ void prefetch(const SkinnyCursor& at) const {
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
      cute::SM90_TMA_LOAD_2D::PREFETCH::copy(w_map, (at.step * Shape::kSub + sub) * Shape::kColumn,
                                             at.tile * Shape::kRows);
    }
  }

  /// Loads W of a unit; the successor may start once all CTAs are `early` units before the end of their loads. What it
  /// prefetches then fills the time in which this kernel ends, instead of taking turns with this kernel's loads.
  __device__ void load_w(const SkinnyCursor& at, int stage, int unit, int end) const {
    load_w(at, stage);
    if (end - 1 - unit == args.early) cudaTriggerProgrammaticLaunchCompletion();
  }

  __device__ void run(int begin, int end) const {
    if (end - begin <= args.early) cudaTriggerProgrammaticLaunchCompletion();
    const int filled = min(args.stages, end - begin);
    SkinnyCursor ahead(args.split, begin);
    int unit = begin;
    for (; unit < begin + filled; ++unit, ahead.next(args.split)) load_w(ahead, unit - begin, unit, end);
    const int prefetched = min(end, unit + args.prefetch);
    for (; unit < prefetched; ++unit, ahead.next(args.split)) prefetch(ahead);

    cudaGridDependencySynchronize();  // x is another kernel's
    SkinnyCursor at(args.split, begin);
    for (int i = 0; i < filled; ++i, at.next(args.split)) load_x(at, i);
    SkinnyRing ring;
    for (unit = begin + filled; unit < end; ++unit, at.next(args.split), ring.next(args.stages)) {
      SkinnyBarrier::wait(shared.empty(ring.stage), ring.parity);
      load_w(at, ring.stage, unit, end);
      load_x(at, ring.stage);
    }
  }
};

}  // namespace aotllm::cuda
