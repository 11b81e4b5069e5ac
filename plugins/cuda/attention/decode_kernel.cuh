#pragma once

#include "attention/decode_consumer.cuh"
#include "attention/decode_epilogue.cuh"
#include "attention/decode_fresh.cuh"
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
__device__ void consume_tile(const DecodeFresh<Tile>& fresh, const DecodeBarriers& barriers, const DecodePhase& phase,
                             std::uint32_t units, const DecodeStageInfo& info, const QueryOperands<Tile, HeadTiles>& q,
                             DecodeState<Tile, HeadTiles>& state) {
  using Barrier = cutlass::arch::ClusterBarrier;
  const bool leader = threadIdx.x % 32 == 0;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const WarpSlab slab{info.begin, info.end, warp % Tile::kSlabs};
  const bool mine = Tile::kTeams == 1 || info.tile % Tile::kTeams == warp / Tile::kSlabs;
  const bool any = mine && slab.any();  // the same for all lanes
  const DecodePrepared<Tile> prepared = fresh.item();
  const int newest = fresh.row_in_slab(info, slab);
  const std::uint32_t keys = units + static_cast<std::uint32_t>(2 * phase.stage * Tile::kUnitBytes);
  DecodeScores<HeadTiles> scores;
  std::uint32_t weights[HeadTiles][2];
  if (any) score_keys<Tile, HeadTiles>(keys, slab, {newest, shared_address(prepared.key)}, q, scores);
  __syncwarp();
  if (leader) Barrier::arrive(barriers.empty_k(phase.stage));
  if (any) {
    scale_and_mask<Tile, HeadTiles>(slab, q, fresh.params.cap, scores);
    weigh<Tile, HeadTiles>(scores, state);
    to_weight_operands<Tile::kType, HeadTiles>(scores, weights);
  }
  Barrier::wait(barriers.full_v(phase.stage), phase.parity);
  if (any) {
    const DetachedRow detached{newest, shared_address(prepared.value)};
    add_values<Tile, HeadTiles>(keys + Tile::kUnitBytes, slab, detached, weights, state);
  }
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
  DecodeFresh<Tile> fresh{shared, storage, params, {}};
  DecodePhase phase;
  while (true) {
    Barrier::wait(barriers.full_k(phase.stage), phase.parity);
    const DecodeStageInfo* info = &infos[phase.double_index()];
    if (info->heads == 0) break;
    const std::uint8_t* queries = shared + storage.queries + phase.stage * params.tile_heads * Tile::kQueryStride;
    if (params.fused) {
      fresh.wait();
      queries = fresh.item().queries;
    }
    QueryOperands<Tile, HeadTiles> q;
    DecodeState<Tile, HeadTiles> state;
    q.load(queries, info->heads, params.score_scale);
    state.clear();
    while (true) {
      consume_tile<Tile, HeadTiles>(fresh, barriers, phase, units, *info, q, state);
      phase.advance(params.stages);
      if (info->last != 0) break;
      Barrier::wait(barriers.full_k(phase.stage), phase.parity);
      info = &infos[phase.double_index()];
    }
    if (params.fused) fresh.release();
    epilogue.finish(*info, state);
  }
  epilogue.end();
}

/// By one warp, before all others use them.
template <class Tile>
__device__ void make_barriers(const DecodeParams& params, std::uint64_t* memory) {
  using Barrier = cutlass::arch::ClusterBarrier;
  // In the order of DecodeBarriers: pairs that one arrival completes and that all consumer warps complete.
  const auto arrivals = [&](int i) {
    if (i < 4 * params.stages) return i % 4 < 2 ? 1 : Tile::kWarps;
    i -= 4 * params.stages;
    if (i < 2 * kDecodeJobs) return i % 2 == 0 ? Tile::kWarps : 1;
    i -= 2 * kDecodeJobs;
    return i % 2 == 0 ? 1 : Tile::kWarps;  // of prepared items; the last is a cluster's
  };
  for (int i = static_cast<int>(threadIdx.x) % 32; i < decode_barriers(params.stages); i += 32) {
    Barrier::init(memory + i, arrivals(i));
  }
  cutlass::arch::fence_barrier_init();
}

/// In a fused launch the producer does not wait for the predecessor: all that it reads was written before the step (see
/// DecodeAttentionArgs::fused), but for the newest position, whose row is replaced.
template <class Tile, int HeadTiles, int BlocksPerSm>
__global__ void __launch_bounds__(Tile::kThreads, BlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeMaps maps, const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) std::uint8_t decode_shared[];
  const DecodeStorage storage =
      decode_storage<Tile>(params.stages, params.tile_heads, params.fused, params.cluster > 0);
  const int role = static_cast<int>(threadIdx.x) / 32 - Tile::kWarps;  // 0: producer, 1: arrivals, else a consumer
  if (role == 0) {
    if (threadIdx.x % 32 == 0) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&maps.large));
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&maps.small));
    }
    make_barriers<Tile>(params, reinterpret_cast<std::uint64_t*>(decode_shared + storage.barriers));
  }
  __syncthreads();
  if (params.cluster > 0) cute::cluster_arrive();  // waited for where another CTA's barrier is first used
  cutlass::arch::launch_dependent_grids();
  const auto wait = [] { cutlass::arch::wait_on_dependent_grids(); };
  if (role == 0) {
    if (!params.fused) wait();
    DecodeProducer<Tile>(params, maps, decode_shared, storage).run();
    if (params.fused) wait();
  } else if (role == 1) {
    run_arrivals<Tile>(params, decode_shared, storage, wait);
  } else {
    wait();
    consume<Tile, HeadTiles>(params, decode_shared, storage);
  }
}

/// Stages that fit into `bytes` of shared memory, at most 6 (beyond that nothing is left to hide).
template <class Tile>
int stages_within(int bytes, const DecodeParams& params) {
  int stages = 6;
  while (stages > 1 &&
         decode_storage<Tile>(stages, params.tile_heads, params.fused, params.cluster > 0).total > bytes) {
    --stages;
  }
  return stages;
}

/// Like launch(), with clusters of `cluster` CTAs.
template <class... Parameters>
void launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, int cluster, std::size_t shared_bytes,
                     const Stream& stream, const Parameters&... args) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.handle;
  config.attrs = attributes;
  config.numAttrs = stream.programmatic ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, args...), "launch of decode attention");
}

template <KvType Type, int HeadDim, int HeadTiles, int Teams>
void launch_decode(const DecodeAttentionArgs& args, const DecodeTuning& tuning, DecodeParams params,
                   const Stream& stream) {
  using Tile = DecodeTile<Type, HeadDim, Teams>;
  // Of an SM's 228 KB a CTA costs 1 KB beside what it asks for.
  constexpr int kHalfSm = (228 * 1024) / 2 - 1024;
  constexpr int kWholeSm = 227 * 1024;
  constexpr bool kTwoBlocks =
      decode_storage<Tile>(2, 8 * HeadTiles, true, false).total <= kHalfSm && (HeadTiles == 1 || Tile::kWarps == 4);
  constexpr int kBlocks = kTwoBlocks ? 2 : 1;
  const auto kernel = decode_kernel<Tile, HeadTiles, kBlocks>;

  params.plan.tile_shift = std::countr_zero(static_cast<unsigned>(Tile::kTokens));
  params.plan.derive();
  int device = 0;
  int sms = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "number of multiprocessors");
  const int blocks = sms * (tuning.blocks_per_sm > 0 ? std::min(kBlocks, tuning.blocks_per_sm) : kBlocks);
  const long long items = static_cast<long long>(args.num_queries) * params.plan.head_tiles * params.max_ranges;
  params.direct = items <= blocks;
  const bool few = params.direct && params.max_ranges > 1 && params.max_ranges <= kDecodeMaxCluster;
  params.cluster = few && !tuning.no_clusters ? params.max_ranges : 0;
  // Where each CTA has a multiprocessor to itself, all of an item is on its way at once.
  params.stages = stages_within<Tile>(kTwoBlocks && items > sms ? kHalfSm : kWholeSm, params);
  if (params.direct) params.stages = std::min(params.stages, params.plan.full_weight - 1);
  if (tuning.stages > 0) params.stages = std::min(params.stages, tuning.stages);
  const auto shared_bytes = static_cast<std::size_t>(
      decode_storage<Tile>(params.stages, params.tile_heads, params.fused, params.cluster > 0).total);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWholeSm), "shared memory");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "shared memory");

  const dim3 grid = params.direct
                        ? dim3(static_cast<unsigned>(params.max_ranges), static_cast<unsigned>(params.plan.head_tiles),
                               static_cast<unsigned>(args.num_queries))
                        : dim3(static_cast<unsigned>(blocks));
  const DecodeMaps maps{kv_tensor_map(args.kv, Tile::kColumnBytes, params.box_tokens),
                        kv_tensor_map(args.kv, Tile::kColumnBytes, kDecodeSmallBox)};
  if (params.cluster > 0) {
    launch_clusters(kernel, grid, dim3(Tile::kThreads), params.cluster, shared_bytes, stream, maps, params);
  } else {
    launch(kernel, grid, dim3(Tile::kThreads), shared_bytes, stream, maps, params);
  }
}

/// Two teams where a tile keeps only four warps busy and registers suffice for more.
template <KvType Type, int HeadDim>
void launch_decode(const DecodeAttentionArgs& args, const DecodeTuning& tuning, const DecodeParams& params,
                   const Stream& stream) {
  constexpr int kTeams = DecodeTile<Type, HeadDim, 1>::kWarps == 4 && HeadDim <= 128 ? 2 : 1;
  if (params.tile_heads > 8) {
    launch_decode<Type, HeadDim, 2, 1>(args, tuning, params, stream);
  } else {
    launch_decode<Type, HeadDim, 1, kTeams>(args, tuning, params, stream);
  }
}

template <KvType Type>
void launch_decode(const DecodeAttentionArgs& args, const DecodeTuning& tuning, const DecodeParams& params,
                   const Stream& stream) {
  switch (args.kv.head_dim) {
    case 64:
      return launch_decode<Type, 64>(args, tuning, params, stream);
    case 96:
      return launch_decode<Type, 96>(args, tuning, params, stream);
    case 128:
      return launch_decode<Type, 128>(args, tuning, params, stream);
    default:
      return launch_decode<Type, 256>(args, tuning, params, stream);
  }
}

}  // namespace aotllm::cuda
