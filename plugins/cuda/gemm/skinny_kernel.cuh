#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/skinny_epilogue.cuh"
#include "gemm/skinny_exchange.cuh"
#include "gemm/skinny_gemm.h"
#include "gemm/skinny_merge.cuh"
#include "gemm/skinny_shape.cuh"

// The kernel behind make_skinny_gemm. Units (a tile of rows × a stage of k) are dealt out in order to a grid of about
// one CTA per multiprocessor; in each, one thread streams W and X through a ring in shared memory and one or two
// warpgroups multiply. W does not depend on other kernels: the ring is filled with it before the predecessor has ended.
namespace aotllm::cuda {

using SkinnyBarrier = cutlass::arch::ClusterTransactionBarrier;

/// Shared memory: the ring, then barriers, the flags of two merges, the staged scales (kFp8Block) and the sums that
/// other CTAs of the cluster send.
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
  __device__ std::uint8_t* fixed() const { return ring + stages * Shape::kStageBytes; }
  __device__ std::uint64_t* full(int stage) const { return reinterpret_cast<std::uint64_t*>(fixed()) + stage; }
  __device__ std::uint64_t* empty(int stage) const { return full(Shape::kMaxStages + stage); }
  __device__ std::uint64_t* exchanged() const { return full(2 * Shape::kMaxStages); }
  __device__ int* flags() const { return reinterpret_cast<int*>(exchanged() + 1); }
  __device__ float* scales(int warpgroup) const {
    return reinterpret_cast<float*>(fixed() + Shape::kBarrierBytes) + warpgroup * Shape::kScaleFloats;
  }
  __device__ float* exchange() const { return scales(Shape::kWarpgroups); }
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
    SkinnyBarrier::arrive_and_expect_tx(shared.full(stage), Shape::kStageBytes);
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
    const int row = tile * Shape::kRows + warpgroup * 64 * Shape::kBlocks;
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
/// bits than float32, then in registers.
template <class Shape, class Scales>
__device__ void skinny_multiply(float (&acc)[Shape::kBlocks][Shape::kAcc], std::uint64_t w, std::uint64_t x, int step,
                                const Scales& scales) {
  using skinny::gmma::ScaleOut;
  constexpr auto kIndex = std::make_index_sequence<Shape::kAcc>{};
  constexpr int kSteps = 4;  // of 32 bytes
  if constexpr (Shape::kBf16) {
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(acc[block][i]);
    }
    cute::warpgroup_arrive();
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int block = 0; block < Shape::kBlocks; ++block) {
          skinny_mma<typename Shape::Mma>(w + (sub * Shape::kWBytes + block * 64 * 128) / 16 + 2 * i,
                                          x + sub * Shape::kXBytes / 16 + 2 * i, acc[block], ScaleOut::One, kIndex);
        }
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(acc[block][i]);
    }
  } else {
#pragma unroll
    for (int part = 0; part < Shape::kSub * Shape::kBlocks; ++part) {
      const int sub = part / Shape::kBlocks;
      const int block = part % Shape::kBlocks;
      float sum[Shape::kAcc];
      for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(sum[i]);
      cute::warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        skinny_mma<typename Shape::Mma>(w + (sub * Shape::kWBytes + block * 64 * 128) / 16 + 2 * i,
                                        x + sub * Shape::kXBytes / 16 + 2 * i, sum,
                                        i == 0 ? ScaleOut::Zero : ScaleOut::One, kIndex);
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(sum[i]);
#pragma unroll
      for (int j = 0; j < Shape::kTokens / 8; ++j) {
        float2 scale = make_float2(1.0f, 1.0f);
        if constexpr (Shape::kType == WeightType::kFp8Block) scale = scales.at(step * Shape::kSub + sub, j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          acc[block][4 * j + 2 * h] += sum[4 * j + 2 * h] * scale.x;
          acc[block][4 * j + 2 * h + 1] += sum[4 * j + 2 * h + 1] * scale.y;
        }
      }
    }
  }
}

/// The consumer threads: products of units [begin, end), and y of the tiles that are complete in this CTA.
template <class Shape>
__device__ void skinny_consume(const SkinnyArgs& args, const SkinnyShared<Shape>& shared, int begin, int end, int m) {
  constexpr bool kBlockScales = Shape::kType == WeightType::kFp8Block;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
  const SkinnySplit& split = args.split;
  const std::uint64_t w =
      skinny_descriptor(cute::cast_smem_ptr_to_uint(shared.w(0, 0))) + warpgroup * Shape::kBlocks * 64 * 128 / 16;
  const std::uint64_t x = skinny_descriptor(cute::cast_smem_ptr_to_uint(shared.x(0, 0)));
  SkinnyCursor at(split, begin);
  SkinnyBlockScales<Shape> scales{args, m, warpgroup, shared.scales(warpgroup), {}};
  if constexpr (kBlockScales) scales.load(at.tile, at.step * Shape::kSub / Shape::kScaleChunk);

  SkinnyRing ring;
  for (int unit = begin; unit < end;) {
    const int count = min(split.per_tile - at.step, end - unit);
    float acc[Shape::kBlocks][Shape::kAcc] = {};
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

    const bool exchanges = args.cluster > 1;
    const SkinnyExchange<Shape> exchange{args.cluster, m, shared.exchange(), shared.exchanged()};
    if (exchanges) exchange.send(acc);
    if (!whole && !exchanges && !merge.arrive(acc)) continue;
    // The groups of 8 tokens that this CTA finishes.
    const int first = exchanges ? exchange.first() : 0;
    const int last = exchanges ? exchange.last() : Shape::kTokens / 8;
    if (8 * first >= m) continue;
    const auto sum = [&] {
      if (exchanges) {
        exchange.sum(acc);
      } else if (!whole) {
        merge.sum(acc);
      }
    };
    const int row16 = tile * Shape::kRows + warpgroup * 64 * Shape::kBlocks + warp * 16;
    using Operands = SkinnyOperands<Shape::kType, Shape::kTokens>;
    if constexpr (Shape::kTokens <= 32) {
      Operands operands;  // on the way while the shares are added
      operands.load(args, row16, 0, first, last, m);
      sum();
      skinny_epilogue<0>(args, acc[0], operands, row16, first, last, m);
    } else {
      sum();
      Operands operands;
      if (first < 4) {
        operands.load(args, row16, 0, first, last, m);
        skinny_epilogue<0>(args, acc[0], operands, row16, first, last, m);
      }
      if (last > 4 && m > 32) {
        operands.load(args, row16, 4, first, last, m);
        skinny_epilogue<4>(args, acc[0], operands, row16, first, last, m);
      }
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
  if (args.cluster > 1) {  // nobody sends before the barriers of all are ready
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

template <WeightType kType, int kTokens, int kRows, int kSub>
SkinnyKernel skinny_kernel() {
  using Shape = SkinnyShape<kType, kTokens, kRows, kSub>;
  return {skinny_gemm_kernel<Shape>, Shape::kThreads,    Shape::kConsumers,
          Shape::kStageBytes,        Shape::kFixedBytes, Shape::kPartialBytes};
}

/// The instantiations that plans may name.
template <WeightType kType>
SkinnyKernel skinny_kernel(int rows_tile, int rows, int sub) {
  const int shape = rows * 10 + sub;
  if (rows_tile == 8 && shape == 642) return skinny_kernel<kType, 8, 64, 2>();
  if (rows_tile == 8 && shape == 644) return skinny_kernel<kType, 8, 64, 4>();
  if (rows_tile == 8 && shape == 1281) return skinny_kernel<kType, 8, 128, 1>();
  if (rows_tile == 16 && shape == 642) return skinny_kernel<kType, 16, 64, 2>();
  if (rows_tile == 16 && shape == 1281) return skinny_kernel<kType, 16, 128, 1>();
  if (rows_tile == 32 && shape == 642) return skinny_kernel<kType, 32, 64, 2>();
  if (rows_tile == 32 && shape == 1281) return skinny_kernel<kType, 32, 128, 1>();
  if (rows_tile == 64 && shape == 1281) return skinny_kernel<kType, 64, 128, 1>();
  return {};
}

}  // namespace aotllm::cuda
