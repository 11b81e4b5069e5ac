#pragma once

#include <cutlass/arch/barrier.h>

#include "gemm/int_epilogue.cuh"
#include "gemm/int_exchange.cuh"
#include "gemm/int_load.cuh"
#include "gemm/int_merge.cuh"
#include "gemm/int_multiply.cuh"

// W · x for few rows of x, W in integers: codes come as they are stored, become bf16 in registers, exactly, and are the
// tensor cores' operand from there. Their sums over a group, in float32, are what scales multiply: W itself is never
// rounded. Tiles are shared, merged and finished as in skinny_kernel.cuh.
namespace aotllm::cuda {

using IntBarrier = cutlass::arch::ClusterTransactionBarrier;

/// Position in the ring, and how often it has been passed (its parity).
struct IntRing {
  int stage = 0;
  unsigned parity = 0;

  __device__ void next(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// One thread: all loads of units [begin, end).
template <class Tile>
struct IntProducer {
  const CUtensorMap* x_map;
  const IntArgs& args;
  IntShared<Tile> shared;

  struct Unit {
    int tile, step;
    __device__ Unit(const SkinnySplit& split, int unit)
        : tile(unit / split.per_tile), step(unit - tile * split.per_tile) {}
  };

  __device__ IntLoad<Tile> load(const Unit& at) const { return {args.w, 0, at.tile * Tile::kWarpgroups, at.step}; }

  __device__ void load_w(int unit, int stage, int end) const {
    const IntLoad<Tile> w = load(Unit(args.split, unit));
    std::uint64_t* full = shared.full(stage);
    IntBarrier::arrive_and_expect_tx(full, w.bytes() + w.count * Tile::kXBytes);
    w.start(shared, stage, full, cute::TMA::CacheHintSm90::EVICT_FIRST);
    // What a successor prefetches fills the time in which this kernel ends.
    if (end - 1 - unit == args.early) cudaTriggerProgrammaticLaunchCompletion();
  }

  __device__ void load_x(int unit, int stage) const {
    const Unit at(args.split, unit);
    const int columns = 2 * load(at).count;
    for (int i = 0; i < columns; ++i) {
      cute::SM90_TMA_LOAD_2D::copy(
          x_map, shared.full(stage), static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
          shared.x(stage, 0) + i * (Tile::kXBytes / 2), (at.step * 2 * Tile::kSub + i) * 64, 0);
    }
  }

  __device__ void run(int begin, int end) const {
    const int stages = args.stages;
    if (end - begin <= args.early) cudaTriggerProgrammaticLaunchCompletion();
    const int filled = min(stages, end - begin);
    int unit = begin;
    for (; unit < begin + filled; ++unit) load_w(unit, unit - begin, end);
    for (const int prefetched = min(end, unit + args.prefetch); unit < prefetched; ++unit) {
      load(Unit(args.split, unit)).prefetch();
    }

    cudaGridDependencySynchronize();  // x is another kernel's
    for (int i = 0; i < filled; ++i) load_x(begin + i, i);
    IntRing ring;
    for (unit = begin + filled; unit < end; ++unit, ring.next(stages)) {
      IntBarrier::wait(shared.empty(ring.stage), ring.parity);
      load_w(unit, ring.stage, end);
      load_x(unit, ring.stage);
    }
  }
};

/// acc of 16 rows from `row16` on × the scales of these rows.
template <class Tile>
__device__ void int_scale_rows(float (&acc)[1][Tile::kAcc], const IntArgs& args, int row16) {
  if (row16 >= args.n) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float scale = __ldg(args.w.scales + row16 + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * h);
#pragma unroll
    for (int j = 0; j < Tile::kTokens / 8; ++j) {
      acc[0][4 * j + 2 * h] *= scale;
      acc[0][4 * j + 2 * h + 1] *= scale;
    }
  }
}

/// y of the groups of 8 tokens [first, last) of a warp's rows; `sum` makes acc whole and is called once.
template <class Tile, class Sum>
__device__ void int_finish(const IntArgs& args, float (&acc)[1][Tile::kAcc], const Sum& sum, int row16, int first,
                           int last, int m) {
  IntOperands<Tile::kTokens> operands;  // no scales are left to apply
  if constexpr (Tile::kTokens <= 32) {
    operands.load(args, row16, 0, first, last, m);  // on the way while the shares are added
    sum();
    int_epilogue<0>(args, acc[0], operands, row16, first, last, m);
  } else {
    sum();
    if (first < 4) {
      operands.load(args, row16, 0, first, last, m);
      int_epilogue<0>(args, acc[0], operands, row16, first, last, m);
    }
    if (last > 4 && m > 32) {
      operands.load(args, row16, 4, first, last, m);
      int_epilogue<4>(args, acc[0], operands, row16, first, last, m);
    }
  }
}

/// acc += W · x, but where rows have one scale codes · x, of the units of one tile from `step` on.
template <class Tile>
__device__ void int_accumulate(float (&acc)[1][Tile::kAcc], const IntArgs& args, const IntShared<Tile>& shared,
                               IntRing& ring, int step, int count) {
  const int strip = static_cast<int>(threadIdx.x) / 128;
#pragma unroll 1
  for (int i = 0; i < count; ++i, ring.next(args.stages)) {
    IntBarrier::wait(shared.full(ring.stage), ring.parity);
    int_multiply_stage<Tile>(acc[0], shared, ring.stage, strip, args.w.k_blocks - (step + i) * Tile::kSub);
    if (threadIdx.x % 32 == 0) IntBarrier::arrive(shared.empty(ring.stage));
  }
}

/// The consumer threads: products of units [begin, end), and y of the tiles that are complete in this CTA.
template <class Tile>
__device__ void int_consume(const IntArgs& args, const IntShared<Tile>& shared, int begin, int end, int m) {
  const SkinnySplit& split = args.split;
  int tile = begin / split.per_tile;
  int step = begin - tile * split.per_tile;
  IntRing ring;
  for (int unit = begin; unit < end; ++tile, step = 0) {
    const int count = min(split.per_tile - step, end - unit);
    const int row16 = tile * Tile::kRows + static_cast<int>(threadIdx.x) / 32 * 16;
    float acc[1][Tile::kAcc] = {};
    int_accumulate(acc, args, shared, ring, step, count);
    if constexpr (Tile::kGroups == 0) int_scale_rows<Tile>(acc, args, row16);

    const bool whole = count == split.per_tile;
    const IntMerge<Tile> merge{args, tile, m, shared.flags() + (unit == begin ? 0 : 2)};
    unit += count;
    const bool exchanges = args.cluster > 1;
    const IntExchange<Tile> exchange{args.cluster, m, shared.exchange(), shared.exchanged()};
    if (exchanges) exchange.send(acc);
    if (!whole && !exchanges && !merge.arrive(acc)) continue;
    // The groups of 8 tokens that this CTA finishes.
    const int first = exchanges ? exchange.first() : 0;
    const int last = exchanges ? exchange.last() : Tile::kTokens / 8;
    if (8 * first >= m) continue;
    const auto sum = [&] {
      if (exchanges) {
        exchange.sum(acc);
      } else if (!whole) {
        merge.sum(acc);
      }
    };
    int_finish<Tile>(args, acc, sum, row16, first, last, m);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    int_gemm_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ IntArgs args, const int m) {
  extern __shared__ __align__(1024) std::uint8_t dynamic_shared[];
  const IntShared<Tile> shared{dynamic_shared, args.stages};
  const bool producer = threadIdx.x == Tile::kConsumers;
  if (producer) {
    cute::prefetch_tma_descriptor(&x_map);
    for (int stage = 0; stage < args.stages; ++stage) {
      IntBarrier::init(shared.full(stage), 1);
      IntBarrier::init(shared.empty(stage), Tile::kConsumers / 32);
    }
    IntBarrier::init(shared.exchanged(), 1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (args.cluster > 1) {  // nobody sends before the barriers of all are ready
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }
  const int begin = args.split.begin(static_cast<int>(blockIdx.x));
  const int end = args.split.begin(static_cast<int>(blockIdx.x) + 1);
  if (threadIdx.x >= Tile::kConsumers) {
    if (producer) IntProducer<Tile>{&x_map, args, shared}.run(begin, end);
  } else {
    cudaGridDependencySynchronize();  // everything but W may be another kernel's
    int_consume<Tile>(args, shared, begin, end, m);
  }
}

template <IntFormat kFormat, int kTokens, int kRows, int kSub>
IntKernel int_kernel() {
  using Tile = IntTile<kFormat, kTokens, kRows, kSub>;
  return {int_gemm_kernel<Tile>, Tile::kThreads,    Tile::kConsumers,
          Tile::kStageBytes,     Tile::kFixedBytes, Tile::kPartialBytes};
}

/// The instantiations that plans may name.
template <IntFormat kFormat, int kTokens>
IntKernel int_kernel(int rows, int sub) {
  if (rows == 64 && sub == 2) return int_kernel<kFormat, kTokens, 64, 2>();
  if (rows == 128 && sub == 1) return int_kernel<kFormat, kTokens, 128, 1>();
  if (rows == 128 && sub == 2) return int_kernel<kFormat, kTokens, 128, 2>();
  if constexpr (int_has_four_bits(kFormat) && kTokens <= 16) {
    if (rows == 64 && sub == 4) return int_kernel<kFormat, kTokens, 64, 4>();
  }
  return {};
}
template <IntFormat kFormat>
IntKernel int_kernel(int rows_tile, int rows, int sub) {
  if (rows_tile == 8) return int_kernel<kFormat, 8>(rows, sub);
  if (rows_tile == 16) return int_kernel<kFormat, 16>(rows, sub);
  if (rows_tile == 32) return int_kernel<kFormat, 32>(rows, sub);
  if (rows_tile == 64) return int_kernel<kFormat, 64>(rows, sub);
  return {};
}

}  // namespace aotllm::cuda
