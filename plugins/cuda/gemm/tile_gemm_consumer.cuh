#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "gemm/tile_gemm_config.cuh"
#include "gemm/tile_gemm_mma.cuh"
#include "uniform_warpgroup.cuh"

namespace aotllm::cuda::tile {

/// One of the two warpgroups that multiply, each half of the tile's rows.
template <class C>
struct Consumer {
  using Accumulators = float[C::kColumns / 2];
  using Share = float[4 * C::kOwnGroups];
  using Residuals = uint4[2][4];  // of a share, in two chunks

  const TileParams& p;
  const Shared<C>& shared;
  Walk<C> walk;
  RingPosition<C::kStages> at;
  int group, thread, warp, lane;  // warpgroup; in it: thread, warp; in this: lane
  std::uint64_t x_descriptor, w_descriptor;

  __device__ Consumer(const TileParams& params, const Shared<C>& s) : p(params), shared(s), walk(params) {
    const int index = static_cast<int>(threadIdx.x) - 128;
    group = uniform_warpgroup() - 1;  // the first one loads
    thread = index % 128;
    warp = thread / 32;
    lane = thread % 32;
    const std::uint32_t ring = cute::cast_smem_ptr_to_uint(shared.ring);
    x_descriptor = descriptor(ring + group * (C::kXBytes / 2));
    w_descriptor = descriptor(ring + C::kXBytes);
  }

  /// All tiles of this CTA.
  __device__ void run() {
    const Stage stage(shared.turn + (group * 4 + warp) * Stage::kBytes, lane);
    for (int turn = 0; walk.more(); walk.next(), turn ^= 1) {
      const int2 origin = walk.origin(p);
      const int share = walk.split * C::kOwnGroups * 8;  // first column that this CTA finishes
      const bool halves = p.epilogue == Epilogue::kGated;
      Place place;
      place.row = origin.x + group * (C::kRows / 2) + warp * 16;
      place.column = halves ? (origin.y + share) / 2 : origin.y + share;
      place.rows_end = p.m;
      place.columns_end = halves ? p.n / 2 : p.n;
      place.lane = lane;

      Column own[2];
      load_columns(origin.y, own);
      float row_scales[2];
      load_row_scales(place.row, row_scales);
      Residuals ahead;
      float acc[C::kColumns / 2];
      if constexpr (C::kType == WeightType::kFp8Block) {
        sum_scaled(acc, origin);
        load_residuals(place, ahead);  // no registers are left for them before
      } else {
        load_residuals(place, ahead);
        sum(acc);
      }

      Column* columns = shared.columns + (turn * 2 + group) * C::kColumns;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (thread + 128 * i < C::kColumns) columns[thread + 128 * i] = own[i];
      }
      NamedBarrier::sync(128, group);
      if constexpr (C::kSplits == 1) {
        scale<C::kGroups>(columns, row_scales, lane, acc);
        if (p.epilogue == Epilogue::kResidual) add_residuals(acc);
        store<C::kGroups>(p, stage, place, acc);
      } else {
        Share total;
        add_splits(acc, total);
        scale<C::kOwnGroups>(columns + share, row_scales, lane, total);
        if (p.epilogue == Epilogue::kResidual) add_residuals(stage, ahead, total);
        store<C::kOwnGroups>(p, stage, place, total);
      }
    }
  }

 private:
  /// Scales of a thread's rows, and of the tile, by block.
  struct BlockScales {
    const float* x[2];
    const float* w;

    __device__ float2 of(int block) const { return make_float2(x[0][block] * w[block], x[1][block] * w[block]); }
  };

  /// Tells the CTAs that write to this ring.
  __device__ void release(int stage) const {
    if constexpr (C::kClusterM == 1) {
      if (thread == 0) ClusterBarrier::arrive(&shared.empty[stage]);
    } else {
      if (thread < C::kClusterM) ClusterBarrier::arrive(&shared.empty[stage], thread, 1);
    }
  }

  /// Starts acc += (block at `stage`), or acc = where it is fresh.
  template <bool kFresh = false>
  __device__ void multiply(int stage, Accumulators& acc) const {
    const std::uint64_t x = x_descriptor + static_cast<std::uint64_t>(stage) * (C::kStageBytes / 16);
    const std::uint64_t w = w_descriptor + static_cast<std::uint64_t>(stage) * (C::kStageBytes / 16);
    cute::warpgroup_arrive();
    mma<C::kFp8, C::kColumns, kFresh>(x, w, acc);
#pragma unroll
    for (int step = 1; step < kBlockBytes / 32; ++step) {
      mma<C::kFp8, C::kColumns, false>(x + step * 2, w + step * 2, acc);
    }
    cute::warpgroup_commit_batch();
  }

  /// acc = this CTA's part of the sum over k.
  __device__ void sum(Accumulators& acc) {
    clear(acc);
    int previous = -1;
    for (int block = 0; block < walk.num_blocks; ++block) {
      ClusterBarrier::wait(&shared.full[at.stage], at.phase);
      fence_registers(acc);
      multiply(at.stage, acc);
      cute::warpgroup_wait<1>();  // the block before this one has been read
      if (previous >= 0) release(previous);
      previous = at.stage;
      at.advance();
    }
    cute::warpgroup_wait<0>();
    fence_registers(acc);
    if (previous >= 0) release(previous);
  }

  /// The same with scales per block: products of single blocks are scaled and added in float32. Two are under way at a
  /// time, so that the tensor cores work on the second one while the first is added.
  __device__ void sum_scaled(Accumulators& acc, int2 origin) {
    const int blocks = (p.k + 127) / 128;
    BlockScales scales;
    scales.w = p.w_scales + static_cast<std::size_t>(min(origin.y, p.n - 1) / 128) * blocks + walk.first_block;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(origin.x + group * 64 + warp * 16 + lane / 4 + 8 * half, p.m - 1);
      scales.x[half] = p.x_scales + static_cast<std::size_t>(row) * blocks + walk.first_block;
    }
    clear(acc);
    float even[C::kColumns / 2];
    float odd[C::kColumns / 2];
    clear(even);
    clear(odd);
    int block = 0;
    for (; block + 1 < walk.num_blocks; block += 2) {
      const float2 scale = scales.of(block);
      const float2 next_scale = scales.of(block + 1);
      const int stage = start(even);
      const int next_stage = start(odd);
      cute::warpgroup_wait<1>();
      fence_registers(even);
      release(stage);
      add_scaled(acc, even, scale);
      cute::warpgroup_wait<0>();
      fence_registers(odd);
      release(next_stage);
      add_scaled(acc, odd, next_scale);
    }
    if (block < walk.num_blocks) {
      const float2 scale = scales.of(block);
      const int stage = start(even);
      cute::warpgroup_wait<0>();
      fence_registers(even);
      release(stage);
      add_scaled(acc, even, scale);
    }
  }

  /// Starts product = (the next block); its stage.
  __device__ int start(Accumulators& product) {
    const int stage = at.stage;
    ClusterBarrier::wait(&shared.full[stage], at.phase);
    fence_registers(product);
    multiply<true>(stage, product);
    at.advance();
    return stage;
  }

  static __device__ void add_scaled(Accumulators& acc, const Accumulators& product, float2 scale) {
#pragma unroll
    for (int i = 0; i < C::kColumns / 2; ++i) acc[i] += product[i] * (i / 2 % 2 == 0 ? scale.x : scale.y);
  }

  /// out = the sum of all splits, added in order of k, of this CTA's share of the columns.
  __device__ void add_splits(const Accumulators& acc, Share& out) const {
    const int index = group * 128 + thread;
    auto* mine = reinterpret_cast<float4*>(shared.ring);  // [group of 8 columns][thread]; the ring is unused now
    NamedBarrier::sync(kConsumers, 2);                    // both warpgroups have read their last block
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      mine[g * kConsumers + index] = make_float4(acc[4 * g], acc[4 * g + 1], acc[4 * g + 2], acc[4 * g + 3]);
    }
    cute::cluster_arrive();
    cute::cluster_wait();
    const auto cluster = cooperative_groups::this_cluster();
#pragma unroll
    for (int split = 0; split < C::kSplits; ++split) {
      const float4* from = cluster.map_shared_rank(mine, split) + walk.split * C::kShareFloat4s + index;
#pragma unroll
      for (int g = 0; g < C::kOwnGroups; ++g) add(split == 0, from[g * kConsumers], &out[4 * g]);
    }
  }

  static __device__ void clear(Accumulators& acc) {
#pragma unroll
    for (float& value : acc) value = 0.0f;
  }
  static __device__ void add(bool first, const float4& part, float* to) {
    to[0] = first ? part.x : to[0] + part.x;
    to[1] = first ? part.y : to[1] + part.y;
    to[2] = first ? part.z : to[2] + part.z;
    to[3] = first ? part.w : to[3] + part.w;
  }

  __device__ void load_columns(int first, Column (&own)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = first + thread + 128 * i;
      own[i] = {1.0f, 0.0f};
      if (thread + 128 * i >= C::kColumns || column >= p.n) continue;
      if (C::kType == WeightType::kFp8) own[i].scale = p.w_scales[column];
      if (p.bias != nullptr) own[i].bias = p.bias[column];
    }
  }
  __device__ void load_row_scales(int first, float (&scales)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + lane / 4 + 8 * half;
      scales[half] = C::kType == WeightType::kFp8 && row < p.m ? p.x_scales[row] : 1.0f;
    }
  }
  static constexpr int width(int groups) { return groups < 8 ? groups : 8; }  // of a chunk

  /// Of the share of a CTA that splits k: its ring will hold sums when they are needed.
  __device__ void load_residuals(const Place& place, Residuals& ahead) const {
    if constexpr (C::kSplits > 1) {
      if (p.epilogue != Epilogue::kResidual) return;
      constexpr int kGroups = C::kOwnGroups;
      static_assert(kGroups <= 16);
      load_residual<width(kGroups)>(p.residual, place, 0, ahead[0]);
      if constexpr (kGroups > 8) load_residual<kGroups - 8>(p.residual, place, 8, ahead[1]);
    }
  }
  __device__ void add_residuals(const Stage& stage, const Residuals& ahead, Share& v) const {
    add_chunk<0, width(C::kOwnGroups)>(stage, ahead[0], v);
    if constexpr (C::kOwnGroups > 8) add_chunk<8, C::kOwnGroups - 8>(stage, ahead[1], v);
  }
  template <int kFirst, int kWidth>
  __device__ void add_chunk(const Stage& stage, const uint4 (&chunk)[4], Share& v) const {
    using Lanes = Chunk<kWidth>;
#pragma unroll
    for (int i = 0; i < Lanes::kLoads; ++i) stage.row(Lanes::row(i, lane), Lanes::granule(i, lane)) = chunk[i];
    __syncwarp();
    add_residual<kFirst, kWidth>(stage, v);
    __syncwarp();
  }

  /// Of a whole tile: 64 columns in each of the next stages of the ring.
  template <int kFirst = 0>
  __device__ void add_residuals(Accumulators& v) {
    if constexpr (kFirst < C::kGroups) {
      ClusterBarrier::wait(&shared.full[at.stage], at.phase);
      const int row = group * (C::kRows / 2) + warp * 16;
      const Stage from(shared.ring + at.stage * C::kStageBytes + row * kBlockBytes, lane);
      add_residual<kFirst, width(C::kGroups - kFirst)>(from, v);
      NamedBarrier::sync(128, group);  // the warpgroup has read them
      release(at.stage);
      at.advance();
      add_residuals<kFirst + 8>(v);
    }
  }
};

}  // namespace aotllm::cuda::tile
