#pragma once

#include "attention/decode_consumer.cuh"
#include "attention/decode_epilogue.cuh"
#include "attention/decode_launch.h"
#include "attention/decode_params.cuh"
#include "attention/decode_producer.cuh"
//
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/grid_dependency_control.h>

#include <algorithm>
#include <bit>

#include "attention/kv_tensor_map.h"

namespace aotllm::cuda {

/// A tile that is in shared memory: adds it to the item's state and gives its stage back.
template <class Tile, int HeadTiles>
__device__ void consume_tile(const DecodeParams& params, const DecodeBarriers& barriers, const DecodePhase& phase,
                             std::uint32_t units, const DecodeStageInfo& info, const QueryOperands<Tile, HeadTiles>& q,
                             DecodeState<Tile, HeadTiles>& state) {
  using Barrier = cutlass::arch::ClusterBarrier;
  const bool leader = threadIdx.x % 32 == 0;
  const WarpSlab slab{info.begin, info.end};
  const bool any = slab.any();  // the same for all lanes
  const std::uint32_t keys = units + static_cast<std::uint32_t>(2 * phase.stage * Tile::kUnitBytes);
  DecodeScores<HeadTiles> scores;
  std::uint32_t weights[HeadTiles][2];
  if (any) score_keys<Tile, HeadTiles>(keys, q, scores);
  __syncwarp();
  if (leader) Barrier::arrive(barriers.empty_k(phase.stage));
  if (any) {
    scale_and_mask<Tile, HeadTiles>(slab, q, params.cap, scores);
    weigh<Tile, HeadTiles>(scores, state);
    to_weight_operands<Tile::kType, HeadTiles>(scores, weights);
  }
  Barrier::wait(barriers.full_v(phase.stage), phase.parity);
  if (any) add_values<Tile, HeadTiles>(keys + Tile::kUnitBytes, slab, weights, state);
  __syncwarp();
  if (leader) Barrier::arrive(barriers.empty_v(phase.stage));
}

/// A consumer warp.
template <class Tile, int HeadTiles>
__device__ void consume(const DecodeParams& params, std::uint8_t* shared, const DecodeStorage& storage) {
  using Barrier = cutlass::arch::ClusterBarrier;
  const DecodeBarriers barriers{reinterpret_cast<std::uint64_t*>(shared + storage.barriers)};
  const auto* infos = reinterpret_cast<const DecodeStageInfo*>(shared + storage.infos);
  const std::uint32_t units = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  DecodeEpilogue<Tile, HeadTiles> epilogue(params, shared, storage);
  DecodePhase phase;
  while (true) {
    Barrier::wait(barriers.full_k(phase.stage), phase.parity);
    const DecodeStageInfo* info = &infos[phase.double_index()];
    if (info->heads == 0) break;
    QueryOperands<Tile, HeadTiles> q;
    DecodeState<Tile, HeadTiles> state;
    q.load(shared + storage.queries + phase.stage * params.tile_heads * Tile::kQueryStride, info->heads,
           params.score_scale);
    state.clear();
    while (true) {
      consume_tile<Tile, HeadTiles>(params, barriers, phase, units, *info, q, state);
      phase.advance(params.stages);
      if (info->last != 0) break;
      Barrier::wait(barriers.full_k(phase.stage), phase.parity);
      info = &infos[phase.double_index()];
    }
    epilogue.finish(*info, state);
  }
  epilogue.end();
}

template <class Tile, int HeadTiles, int BlocksPerSm>
__global__ void __launch_bounds__(Tile::kThreads, BlocksPerSm)
    decode_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) std::uint8_t decode_shared[];
  const DecodeStorage storage = decode_storage<Tile>(params.stages, params.tile_heads);
  const int role = static_cast<int>(threadIdx.x) / 32 - Tile::kWarps;  // 0: producer, 1: arrivals, else a consumer
  if (role == 0 && threadIdx.x % 32 == 0) {
    using Barrier = cutlass::arch::ClusterBarrier;
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&map));
    const DecodeBarriers barriers{reinterpret_cast<std::uint64_t*>(decode_shared + storage.barriers)};
    for (int i = 0; i < params.stages; ++i) {
      Barrier::init(barriers.full_k(i), 1);
      Barrier::init(barriers.full_v(i), 1);
      Barrier::init(barriers.empty_k(i), Tile::kWarps);
      Barrier::init(barriers.empty_v(i), Tile::kWarps);
    }
    for (int i = 0; i < kDecodeJobs; ++i) {
      Barrier::init(barriers.stored(params.stages, i), Tile::kWarps);
      Barrier::init(barriers.taken(params.stages, i), 1);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  cutlass::arch::launch_dependent_grids();
  cutlass::arch::wait_on_dependent_grids();
  if (role == 0) {
    DecodeProducer<Tile>(params, map, decode_shared, storage).run();
  } else if (role == 1) {
    run_arrivals<Tile>(params, decode_shared, storage);
  } else {
    consume<Tile, HeadTiles>(params, decode_shared, storage);
  }
}

/// Stages that fit into `bytes` of shared memory, at most 6 (beyond that nothing is left to hide).
template <class Tile>
int stages_within(int bytes, int heads) {
  int stages = 6;
  while (stages > 1 && decode_storage<Tile>(stages, heads).total > bytes) --stages;
  return stages;
}

template <KvType Type, int HeadDim, int HeadTiles>
void launch_decode(const DecodeAttentionArgs& args, const DecodeTuning& tuning, DecodeParams params,
                   const Stream& stream) {
  using Tile = DecodeTile<Type, HeadDim>;
  // Of an SM's 228 KB a CTA costs 1 KB beside what it asks for.
  constexpr int kHalfSm = (228 * 1024) / 2 - 1024;
  constexpr int kWholeSm = 227 * 1024;
  constexpr bool kTwoBlocks =
      decode_storage<Tile>(2, 8 * HeadTiles).total <= kHalfSm && (HeadTiles == 1 || Tile::kWarps == 4);
  constexpr int kBlocks = kTwoBlocks ? 2 : 1;
  const auto kernel = decode_kernel<Tile, HeadTiles, kBlocks>;

  params.plan.tile_shift = std::countr_zero(static_cast<unsigned>(Tile::kTokens));
  params.plan.derive();
  params.stages = stages_within<Tile>(kTwoBlocks ? kHalfSm : kWholeSm, params.tile_heads);
  if (tuning.stages > 0) params.stages = std::min(params.stages, tuning.stages);
  const int shared_bytes = decode_storage<Tile>(params.stages, params.tile_heads).total;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "shared memory");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "shared memory");

  int device = 0;
  int sms = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "number of multiprocessors");
  const int blocks = sms * (tuning.blocks_per_sm > 0 ? std::min(kBlocks, tuning.blocks_per_sm) : kBlocks);
  const long long items = static_cast<long long>(args.num_queries) * params.plan.head_tiles * params.max_ranges;
  params.direct = items <= blocks;
  const dim3 grid = params.direct
                        ? dim3(static_cast<unsigned>(params.max_ranges), static_cast<unsigned>(params.plan.head_tiles),
                               static_cast<unsigned>(args.num_queries))
                        : dim3(static_cast<unsigned>(blocks));
  const CUtensorMap map = kv_tensor_map(args.kv, Tile::kColumnBytes, params.box_tokens);
  launch(kernel, grid, dim3(Tile::kThreads), static_cast<std::size_t>(shared_bytes), stream, map, params);
}

template <KvType Type>
void launch_decode(const DecodeAttentionArgs& args, const DecodeTuning& tuning, const DecodeParams& params,
                   const Stream& stream) {
  const bool wide = params.tile_heads > 8;
  switch (args.kv.head_dim) {
    case 64:
      return wide ? launch_decode<Type, 64, 2>(args, tuning, params, stream)
                  : launch_decode<Type, 64, 1>(args, tuning, params, stream);
    case 96:
      return wide ? launch_decode<Type, 96, 2>(args, tuning, params, stream)
                  : launch_decode<Type, 96, 1>(args, tuning, params, stream);
    case 128:
      return wide ? launch_decode<Type, 128, 2>(args, tuning, params, stream)
                  : launch_decode<Type, 128, 1>(args, tuning, params, stream);
    default:
      return wide ? launch_decode<Type, 256, 2>(args, tuning, params, stream)
                  : launch_decode<Type, 256, 1>(args, tuning, params, stream);
  }
}

}  // namespace aotllm::cuda
