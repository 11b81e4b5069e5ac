#pragma once

#include <cutlass/arch/barrier.h>

#include "gemm/skinny_epilogue.cuh"
#include "gemm/skinny_exchange.cuh"
#include "gemm/skinny_gemm.h"
#include "gemm/skinny_merge.cuh"
#include "gemm/skinny_multiply.cuh"
#include "gemm/skinny_producer.cuh"
#include "gemm/skinny_shape.cuh"
#include "uniform_warpgroup.cuh"

// The kernel behind make_skinny_gemm. Units (a tile of rows × a stage of k) are dealt out in order to a grid of about
// one CTA per multiprocessor; in each, one thread streams W and X through a ring in shared memory and warpgroups of 64
// rows each multiply. W does not depend on other kernels: the ring is filled with it before the predecessor has ended.
namespace aotllm::cuda {

/// y of the groups of 8 tokens that this CTA of a cluster owns. It has no other tile.
template <class Shape>
__device__ void skinny_finish_share(const SkinnyArgs& args, const SkinnyShared<Shape>& shared,
                                    const float (&acc)[Shape::kAcc], const SkinnyFactors<Shape>& factors, int tile,
                                    int m) {
  const SkinnyExchange<Shape> exchange{args.cluster, m, shared.sums(), shared.exchanged()};
  exchange.send(acc);
  if (8 * exchange.first() >= m) return;
  factors.store();
  exchange.wait();
  skinny_sync(Shape::kConsumers, 0);
  const SkinnyEpilogue<Shape> epilogue{args, exchange.sums(), factors, tile, m};
  epilogue.finish(args.cluster, exchange.first(), exchange.last() - exchange.first());
}

/// y of a tile whose sums are all here: they pass through shared memory in pieces.
template <class Shape>
__device__ void skinny_finish_tile(const SkinnyArgs& args, const SkinnyShared<Shape>& shared,
                                   const float (&acc)[Shape::kAcc], const SkinnyFactors<Shape>& factors, int tile,
                                   int m) {
  const SkinnySums<Shape> sums{shared.sums(), Shape::kPiece};
  const SkinnyEpilogue<Shape> epilogue{args, sums, factors, tile, m};
  factors.store();
#pragma unroll 1
  for (int first = 0; 8 * first < m; first += Shape::kPiece) {
#pragma unroll
    for (int group = 0; group < Shape::kGroups; ++group) {
      if (group - group % Shape::kPiece != first) continue;
      const float* from = &acc[4 * group];
      *sums.place(0, group % Shape::kPiece) = make_float4(from[0], from[1], from[2], from[3]);
    }
    skinny_sync(Shape::kConsumers, 0);
    epilogue.finish(1, first, Shape::kPiece);
    skinny_sync(Shape::kConsumers, 0);  // before anything here is written again
  }
}

template <class Shape>
__device__ bool skinny_clusters(const SkinnyArgs& args) {
  return Shape::kRole.is_known ? Shape::kRole.clusters : args.cluster > 1;
}

/// The consumer threads: products of units [begin, end), and y of the tiles that are complete in this CTA.
template <class Shape>
__device__ void skinny_consume(const SkinnyArgs& args, const SkinnyShared<Shape>& shared, int begin, int end, int m) {
  constexpr bool kBlockScales = Shape::kType == WeightType::kFp8Block;
  const int warpgroup = uniform_warpgroup();
  const SkinnySplit& split = args.split;
  const std::uint64_t w = skinny_descriptor(cute::cast_smem_ptr_to_uint(shared.w(0, 0))) + warpgroup * 64 * 128 / 16;
  const std::uint64_t x = skinny_descriptor(cute::cast_smem_ptr_to_uint(shared.x(0, 0)));
  SkinnyCursor at(split, begin);
  SkinnyBlockScales<Shape> scales{args, m, warpgroup, shared.scales(warpgroup), {}};
  if constexpr (kBlockScales) scales.load(at.tile, at.step * Shape::kSub / Shape::kScaleChunk);

  SkinnyFactors<Shape> factors{shared.factors()};
  SkinnyRing ring;
  for (int unit = begin; unit < end;) {
    const int count = min(split.per_tile - at.step, end - unit);
    factors.load(args, at.tile, m);
    float acc[Shape::kAcc] = {};
#pragma unroll 1
    for (int i = 0; i < count; ++i, ring.next(args.stages)) {
      const int step = at.step + i;
      if constexpr (kBlockScales) {
        if (unit + i == begin || step * Shape::kSub % Shape::kScaleChunk == 0) scales.stage(at.tile, step);
      }
      SkinnyBarrier::wait(shared.full(ring.stage), ring.parity);
      const std::uint64_t offset = static_cast<std::uint64_t>(ring.stage) * (Shape::kStageBytes / 16);
      if constexpr (Shape::kChained) {
        skinny_multiply_groups<Shape>(acc, w + offset, x + offset, shared.group_scales(ring.stage));
      } else {
        skinny_multiply<Shape>(acc, w + offset, x + offset, step, scales);
      }
      if (threadIdx.x % 32 == 0) SkinnyBarrier::arrive(shared.empty(ring.stage));
    }
    const int tile = at.tile;
    const bool whole = count == split.per_tile;
    const SkinnyMerge<Shape> merge{args, tile, m, shared.flags() + (unit == begin ? 0 : 2)};
    unit += count;
    at.step = 0;
    ++at.tile;
    if (skinny_clusters<Shape>(args)) {
      skinny_finish_share<Shape>(args, shared, acc, factors, tile, m);
    } else {
      if (!whole) {
        if (!merge.arrive(acc)) continue;
        merge.sum(acc);
      }
      skinny_finish_tile<Shape>(args, shared, acc, factors, tile, m);
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    skinny_gemm_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ SkinnyArgs args, const int m) {
  extern __shared__ __align__(1024) std::uint8_t dynamic_shared[];
  const SkinnyShared<Shape> shared{dynamic_shared, args.stages};
  const bool producer = threadIdx.x == Shape::kConsumers;
  if (producer) {
    cute::prefetch_tma_descriptor(&w_map);
    cute::prefetch_tma_descriptor(&x_map);
    for (int stage = 0; stage < args.stages; ++stage) {
      SkinnyBarrier::init(shared.full(stage), 1);
      SkinnyBarrier::init(shared.empty(stage), Shape::kConsumers / 32);
    }
    SkinnyBarrier::init(shared.exchanged(), 1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (skinny_clusters<Shape>(args)) {  // nobody sends before the barriers of all are ready
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }
  const int begin = args.split.begin(static_cast<int>(blockIdx.x));
  const int end = args.split.begin(static_cast<int>(blockIdx.x) + 1);
  if (threadIdx.x >= Shape::kConsumers) {
    if (producer) SkinnyProducer<Shape>{&w_map, &x_map, args, shared}.run(begin, end);
  } else {
    cudaGridDependencySynchronize();  // everything but W may be another kernel's
    skinny_consume<Shape>(args, shared, begin, end, m);
  }
}

template <class Shape>
SkinnyKernel skinny_kernel_of() {
  SkinnyKernel kernel;
  kernel.function = skinny_gemm_kernel<Shape>;
  kernel.threads = Shape::kThreads;
  kernel.stage_bytes = Shape::kStageBytes + Shape::kStageScaleBytes;
  kernel.scale_bytes = Shape::kStageScaleBytes;
  kernel.fixed_bytes = Shape::kFixedBytes;
  kernel.group_bytes = Shape::kGroupBytes;
  kernel.piece = Shape::kPiece;
  kernel.partial_bytes = Shape::kPartialBytes;
  return kernel;
}

/// A kernel of its own for each role where there are so few rows that it pays, else one for any; a link of a chain has
/// a role.
template <WeightType kType, int kTokens, int kRows, int kSub, bool kChained>
SkinnyKernel skinny_kernel(SkinnyRole role) {
  constexpr bool kHasRoles = kType != WeightType::kFp8Block && kTokens <= 16;
  if constexpr (!kHasRoles && kChained) {
    return {};
  } else if constexpr (!kHasRoles) {
    return skinny_kernel_of<SkinnyShape<kType, kTokens, kRows, kSub>>();
  } else {
    const auto of = [&]<Epilogue kEpilogue>(std::integral_constant<Epilogue, kEpilogue>) {
      constexpr SkinnyRole kClusters{true, kEpilogue, true, kChained};
      constexpr SkinnyRole kAlone{true, kEpilogue, false, kChained};
      return role.clusters ? skinny_kernel_of<SkinnyShape<kType, kTokens, kRows, kSub, kClusters>>()
                           : skinny_kernel_of<SkinnyShape<kType, kTokens, kRows, kSub, kAlone>>();
    };
    switch (role.epilogue) {
      case Epilogue::kStore:
        return of(std::integral_constant<Epilogue, Epilogue::kStore>{});
      case Epilogue::kResidual:
        return of(std::integral_constant<Epilogue, Epilogue::kResidual>{});
      case Epilogue::kGated:
        return of(std::integral_constant<Epilogue, Epilogue::kGated>{});
      case Epilogue::kLogits:
        if constexpr (!kChained) return of(std::integral_constant<Epilogue, Epilogue::kLogits>{});
    }
    return {};
  }
}

/// The instantiations that plans may name.
template <WeightType kType, bool kChained = false>
SkinnyKernel skinny_kernel(int rows_tile, int rows, int sub, SkinnyRole role) {
  const int shape = rows * 10 + sub;
  if (rows_tile == 8 && shape == 642) return skinny_kernel<kType, 8, 64, 2, kChained>(role);
  if (rows_tile == 8 && shape == 644) return skinny_kernel<kType, 8, 64, 4, kChained>(role);
  if (rows_tile == 8 && shape == 1281) return skinny_kernel<kType, 8, 128, 1, kChained>(role);
  if (rows_tile == 16 && shape == 642) return skinny_kernel<kType, 16, 64, 2, kChained>(role);
  if (rows_tile == 16 && shape == 1281) return skinny_kernel<kType, 16, 128, 1, kChained>(role);
  if (rows_tile == 32 && shape == 642) return skinny_kernel<kType, 32, 64, 2, kChained>(role);
  if (rows_tile == 32 && shape == 1281) return skinny_kernel<kType, 32, 128, 1, kChained>(role);
  if (rows_tile == 64 && shape == 1281) return skinny_kernel<kType, 64, 128, 1, kChained>(role);
  return {};
}

}  // namespace aotllm::cuda
