#pragma once

#include "attention/decode_consumer.cuh"
#include "attention/decode_items.cuh"
#include "attention/decode_params.cuh"
//
#include <cutlass/arch/barrier.h>

// The fused part of decode attention: what rope_kv does for decode rows, by items of work.
namespace aotllm::cuda {

/// Where a prepared item lies in shared memory.
template <class Tile>
struct DecodePrepared {
  std::uint8_t* queries;  ///< [heads] rows of kQueryStride bytes
  std::uint8_t* key;      ///< [kRowBytes], as the cache stores it; of the item that holds the newest position
  std::uint8_t* value;

  __device__ DecodePrepared(std::uint8_t* shared, const DecodeStorage& storage, int heads, int slot)
      : queries(shared + storage.prepared + slot * Tile::prepared_bytes(heads)),
        key(queries + heads * Tile::kQueryStride),
        value(key + Tile::kRowBytes) {}
};

/// Makes the CTA's items ahead of its consumers. By all lanes of the arrival warp.
template <class Tile>
class DecodePreparer {
 public:
  __device__ DecodePreparer(const DecodeParams& params, std::uint8_t* shared, const DecodeStorage& storage)
      : params_(params),
        shared_(shared),
        storage_(storage),
        barriers_{reinterpret_cast<std::uint64_t*>(shared + storage.barriers)},
        lane_(static_cast<int>(threadIdx.x) % 32),
        items_(params) {}

  /// What can be done before the predecessor is waited for: queries and block tables are older than the step's first
  /// kernel.
  __device__ void begin() {
    items_.begin();
    if (items_.valid()) begin_item();
  }
  /// An item is left.
  __device__ bool pending() const { return items_.valid(); }
  /// There is room for it.
  __device__ bool has_room() const {
    using Barrier = cutlass::arch::ClusterBarrier;
    return __all_sync(~0u, Barrier::test_wait(barriers_.used(params_.stages, phase_.stage), phase_.parity ^ 1, true));
  }
  __device__ void wait_for_room() const {
    cutlass::arch::ClusterBarrier::wait(barriers_.used(params_.stages, phase_.stage), phase_.parity ^ 1);
  }
  __device__ void prepare() {
    const int heads = items_.heads();
    const int wanted = (heads + (items_.holds_newest() ? 2 : 0)) << params_.layout.lanes_log2;
    const Rotation work{params_.rope, params_.layout, rotation(), items_.entry().row};
    const DecodePrepared<Tile> to(shared_, storage_, params_.tile_heads, phase_.stage);
    for (int first = 0; first < wanted; first += 32 * kAhead) {
      typename Rotation::Item items[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int index = first + 32 * i + lane_;
        const int head = head_of(work, index >> params_.layout.lanes_log2, heads);
        work.load(index < wanted ? head : work.heads(), index & ((1 << params_.layout.lanes_log2) - 1), items[i]);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + 32 * i >= wanted) break;
        work.turn(items[i]);
        store(work, items[i], to, (first + 32 * i + lane_) >> params_.layout.lanes_log2);
      }
    }
    __syncwarp();
    if (lane_ == 0) cutlass::arch::ClusterBarrier::arrive(barriers_.ready(params_.stages, phase_.stage));
    phase_.advance(kDecodePrepared);
    items_.advance();
    if (items_.valid()) begin_item();
  }

 private:
  using Rotation = RowRotation<8, 1>;
  static constexpr int kAhead = 2;  ///< loads in flight

  __device__ float2* rotation() const { return reinterpret_cast<float2*>(shared_ + storage_.rotation); }

  /// Angles of the item's position, and the block that holds it.
  __device__ void begin_item() {
    const int position = items_.entry().context - 1;
    for (int i = lane_; i < params_.rope.rotary_half; i += 32) {
      rotation()[Rotation::rotation_index(params_.rope, i)] =
          rotation_at(params_.rope, position, __ldg(params_.rope.inv_freq + i));
    }
    const std::size_t row =
        static_cast<std::size_t>(items_.entry().sequence) * static_cast<std::size_t>(params_.table_stride);
    block_ = __ldcg(params_.block_table + row + static_cast<std::size_t>(position >> params_.block_shift));
    __syncwarp();
  }

  /// The head of a row of qkv that is the item's `index`-th: its queries, then K, then V.
  __device__ int head_of(const Rotation& work, int index, int heads) const {
    const int kv_head = items_.kv_head();
    if (index < heads) return kv_head * params_.group + items_.head_in_group() + index;
    return params_.num_heads + kv_head + (index == heads ? 0 : work.args.num_kv_heads);
  }

  __device__ void store(const Rotation& work, const typename Rotation::Item& item, const DecodePrepared<Tile>& to,
                        int index) const {
    if (work.is_q(item)) {
      auto* query = reinterpret_cast<__nv_bfloat16*>(to.queries + index * Tile::kQueryStride);
      work.for_chunks(item, [&](int dim, const float (&values)[8]) { store_bf16<8>(query + dim, values); });
      return;
    }
    if (item.head >= work.heads()) return;
    const int position = items_.entry().context - 1;
    const int offset = position - (position >> params_.block_shift << params_.block_shift);
    std::uint8_t* cache = params_.rope.kv.base + cache_offset(work, item, params_.rope.kv, block_, offset);
    const bool writes = items_.head_in_group() == 0;  // else another head tile of the KV head does
    std::uint8_t* row = work.is_v(item) ? to.value : to.key;
    work.for_chunks(item, [&](int dim, const float (&values)[8]) {
      if constexpr (Tile::kType == KvType::kBf16) {
        const uint4 packed = pack_bf16(values);
        *reinterpret_cast<uint4*>(row + 2 * dim) = packed;
        if (writes) *reinterpret_cast<uint4*>(cache + 2 * dim) = packed;
      } else {
        const uint2 packed = pack_fp8(values);
        *reinterpret_cast<uint2*>(row + dim) = packed;
        if (writes) *reinterpret_cast<uint2*>(cache + dim) = packed;
      }
    });
  }

  const DecodeParams& params_;
  std::uint8_t* shared_;
  DecodeStorage storage_;
  DecodeBarriers barriers_;
  int lane_;
  DecodeItems items_;
  int block_ = 0;  ///< of the newest position
  DecodePhase phase_;
};

/// A consumer warp's part: its place in the ring of prepared items.
template <class Tile>
struct DecodeFresh {
  std::uint8_t* shared;
  const DecodeStorage& storage;
  const DecodeParams& params;
  DecodePhase phase;

  __device__ DecodeBarriers barriers() const { return {reinterpret_cast<std::uint64_t*>(shared + storage.barriers)}; }
  __device__ DecodePrepared<Tile> item() const { return {shared, storage, params.tile_heads, phase.stage}; }
  __device__ void wait() const {
    cutlass::arch::ClusterBarrier::wait(barriers().ready(params.stages, phase.stage), phase.parity);
  }
  /// The warp is through with the item.
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) cutlass::arch::ClusterBarrier::arrive(barriers().used(params.stages, phase.stage));
    phase.advance(kDecodePrepared);
  }
  /// The new token's row of the slab; -1 where it is not there. What the tile holds in its place is older than it.
  __device__ int row_in_slab(const DecodeStageInfo& info, const WarpSlab& slab) const {
    const bool last = params.fused && info.last != 0 && info.range == info.ranges - 1;
    const int row = info.end - 1 - slab.first();
    return last && row < kDecodeSlab ? row : -1;
  }
};

}  // namespace aotllm::cuda
