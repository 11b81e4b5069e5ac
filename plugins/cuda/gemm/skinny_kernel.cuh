#pragma once

#include <cutlass/arch/barrier.h>

#include "gemm/skinny_epilogue.cuh"
#include "gemm/skinny_exchange.cuh"
#include "gemm/skinny_gemm.h"
#include "gemm/skinny_merge.cuh"
#include "gemm/skinny_producer.cuh"
#include "gemm/skinny_shape.cuh"

// The kernel behind make_skinny_gemm. Units (a tile of rows × a stage of k) are dealt out in order to a grid of about
// one CTA per multiprocessor; in each, one thread streams W and X through a ring in shared memory and warpgroups of 64
// rows each multiply. W does not depend on other kernels: the ring is filled with it before the predecessor has ended.
namespace aotllm::cuda {

/// Scales of kFp8Block, w · x of a chunk of columns at a time in shared memory: [kScaleChunk][kTokens], of this
/// warpgroup. The next chunk's are on the way in registers meanwhile.
template <class Shape>
struct SkinnyBlockScales {
  static constexpr int kEach = (Shape::kTokens * Shape::kScaleChunk + 127) / 128;

  const SkinnyArgs& args;
  int m;
  int warpgroup;
  float* staged;
  float next[kEach];

  __device__ void load(int tile, int chunk) {
    const int row = tile * Shape::kRows + warpgroup * 64;
    const int column = chunk * Shape::kScaleChunk + static_cast<int>(threadIdx.x) % Shape::kScaleChunk;
    const bool inside = row < args.n && column < args.k_blocks;
    const float w = inside ? __ldg(args.w_scales + static_cast<std::size_t>(row / 128) * args.k_blocks + column) : 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = static_cast<int>(threadIdx.x) % 128 / Shape::kScaleChunk + i * (128 / Shape::kScaleChunk);
      const bool wanted = inside && token < m;
      next[i] = wanted ? w * __ldcg(args.x_scales + static_cast<std::size_t>(token) * args.k_blocks + column) : 0.0f;
    }
  }

  /// Makes the chunk of (tile, step) readable and starts loading the one that follows.
  __device__ void stage(int tile, int step) {
    skinny_sync(128, 1 + warpgroup);  // nobody reads the previous chunk any more
    const int column = static_cast<int>(threadIdx.x) % Shape::kScaleChunk;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = static_cast<int>(threadIdx.x) % 128 / Shape::kScaleChunk + i * (128 / Shape::kScaleChunk);
      if (token < Shape::kTokens) staged[column * Shape::kScaleStride + token] = next[i];
    }
    skinny_sync(128, 1 + warpgroup);
    const int chunk = step * Shape::kSub / Shape::kScaleChunk + 1;
    const bool same = chunk * Shape::kScaleChunk < args.split.per_tile * Shape::kSub;
    load(same ? tile : tile + 1, same ? chunk : 0);
  }

  /// Of tokens 8j + 2 (lane % 4) + {0, 1}.
  __device__ float2 at(int column, int j) const {
    const float* row = staged + column % Shape::kScaleChunk * Shape::kScaleStride;
    return *reinterpret_cast<const float2*>(row + 8 * j + 2 * (threadIdx.x % 4));
  }
};

/// acc += W · x of one stage. FP8 products are summed in the tensor cores over 128 columns only, where they keep fewer
/// bits than float32, then in registers; as many columns as registers allow are on the way together.
template <class Shape, class Scales>
__device__ void skinny_multiply(float (&acc)[Shape::kAcc], std::uint64_t w, std::uint64_t x, int step,
                                const Scales& scales) {
  using skinny::gmma::ScaleOut;
  constexpr auto kIndex = std::make_index_sequence<Shape::kAcc>{};
  constexpr int kSteps = 4;  // of 32 bytes
  if constexpr (Shape::kBf16) {
    for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(acc[i]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        skinny_mma<typename Shape::Mma>(w + sub * Shape::kWBytes / 16 + 2 * i, x + sub * Shape::kXBytes / 16 + 2 * i,
                                        acc, ScaleOut::One, kIndex);
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(acc[i]);
  } else {
    float sum[Shape::kSub][Shape::kAcc];
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
      for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(sum[sub][i]);
    }
    cute::warpgroup_arrive();
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        skinny_mma<typename Shape::Mma>(w + sub * Shape::kWBytes / 16 + 2 * i, x + sub * Shape::kXBytes / 16 + 2 * i,
                                        sum[sub], i == 0 ? ScaleOut::Zero : ScaleOut::One, kIndex);
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
      for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(sum[sub][i]);
#pragma unroll
      for (int j = 0; j < Shape::kGroups; ++j) {
        float2 scale = make_float2(1.0f, 1.0f);
        if constexpr (Shape::kType == WeightType::kFp8Block) scale = scales.at(step * Shape::kSub + sub, j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          acc[4 * j + 2 * h] += sum[sub][4 * j + 2 * h] * scale.x;
          acc[4 * j + 2 * h + 1] += sum[sub][4 * j + 2 * h + 1] * scale.y;
        }
      }
    }
  }
}

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
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
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
      skinny_multiply<Shape>(acc, w + offset, x + offset, step, scales);
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
  return {skinny_gemm_kernel<Shape>, Shape::kThreads, Shape::kStageBytes,  Shape::kFixedBytes,
          Shape::kGroupBytes,        Shape::kPiece,   Shape::kPartialBytes};
}

/// A kernel of its own for each role where there are so few rows that it pays, else one for any.
template <WeightType kType, int kTokens, int kRows, int kSub>
SkinnyKernel skinny_kernel(SkinnyRole role) {
  if constexpr (kType == WeightType::kFp8Block || kTokens > 16) {
    return skinny_kernel_of<SkinnyShape<kType, kTokens, kRows, kSub>>();
  } else {
    const auto of = [&]<Epilogue kEpilogue>(std::integral_constant<Epilogue, kEpilogue>) {
      return role.clusters
                 ? skinny_kernel_of<SkinnyShape<kType, kTokens, kRows, kSub, SkinnyRole{true, kEpilogue, true}>>()
                 : skinny_kernel_of<SkinnyShape<kType, kTokens, kRows, kSub, SkinnyRole{true, kEpilogue, false}>>();
    };
    switch (role.epilogue) {
      case Epilogue::kStore:
        return of(std::integral_constant<Epilogue, Epilogue::kStore>{});
      case Epilogue::kResidual:
        return of(std::integral_constant<Epilogue, Epilogue::kResidual>{});
      case Epilogue::kGated:
        return of(std::integral_constant<Epilogue, Epilogue::kGated>{});
      case Epilogue::kLogits:
        return of(std::integral_constant<Epilogue, Epilogue::kLogits>{});
    }
    return {};
  }
}

/// The instantiations that plans may name.
template <WeightType kType>
SkinnyKernel skinny_kernel(int rows_tile, int rows, int sub, SkinnyRole role) {
  const int shape = rows * 10 + sub;
  if (rows_tile == 8 && shape == 642) return skinny_kernel<kType, 8, 64, 2>(role);
  if (rows_tile == 8 && shape == 644) return skinny_kernel<kType, 8, 64, 4>(role);
  if (rows_tile == 8 && shape == 1281) return skinny_kernel<kType, 8, 128, 1>(role);
  if (rows_tile == 16 && shape == 642) return skinny_kernel<kType, 16, 64, 2>(role);
  if (rows_tile == 16 && shape == 1281) return skinny_kernel<kType, 16, 128, 1>(role);
  if (rows_tile == 32 && shape == 642) return skinny_kernel<kType, 32, 64, 2>(role);
  if (rows_tile == 32 && shape == 1281) return skinny_kernel<kType, 32, 128, 1>(role);
  if (rows_tile == 64 && shape == 1281) return skinny_kernel<kType, 64, 128, 1>(role);
  return {};
}

}  // namespace aotllm::cuda
