#pragma once

#include "attention/decode_params.cuh"
//
#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

namespace aotllm::cuda {

/// One tile of an item, and what this lane has to fetch of it.
struct DecodeLoad {
  DecodeStageInfo info;
  std::int32_t kv_head = 0;
  std::int32_t block = 0;  ///< of this lane's box
  std::int32_t block_row = 0;
  bool active = false;  ///< this lane has a box
  bool valid = false;   ///< there is a tile (the same in all lanes)
};

/// The producer warp: all lanes walk the CTA's items together, each lane issues one box of a tile.
template <class Tile>
class DecodeProducer {
 public:
  __device__ DecodeProducer(const DecodeParams& params, const CUtensorMap& map, std::uint8_t* shared,
                            const DecodeStorage& storage)
      : params_(params),
        map_(map),
        shared_(shared),
        storage_(storage),
        barriers_{reinterpret_cast<std::uint64_t*>(shared + storage.barriers)},
        lane_(static_cast<int>(threadIdx.x) % 32),
        column_(lane_ % Tile::kColumns),
        token_(lane_ / Tile::kColumns * params.box_tokens) {}

  __device__ void run() {
    if (params_.direct ? find_item() : find_share()) {
      for (DecodeLoad load = next(); load.valid; load = next()) issue(load);
    }
    cutlass::arch::ClusterBarrier::wait(barriers_.empty_k(phase_.stage), phase_.parity ^ 1);
    if (lane_ == 0) {
      stage_info().heads = 0;
      cutlass::arch::ClusterBarrier::arrive(barriers_.full_k(phase_.stage));
    }
  }

 private:
  __device__ DecodeStageInfo& stage_info() const {
    return reinterpret_cast<DecodeStageInfo*>(shared_ + storage_.infos)[phase_.double_index()];
  }

  /// Sets the cursor to this CTA's item; false where the query has no such range.
  __device__ bool find_item() {
    const int query = static_cast<int>(blockIdx.z);
    cursor_.query = query;
    cursor_.entry = params_.queries[query];
    cursor_.ranges = decode_ranges(params_.plan, cursor_.entry.context);
    cursor_.head_tile = static_cast<int>(blockIdx.y);
    cursor_.range = static_cast<int>(blockIdx.x);
    share_end_ = 1;
    return cursor_.range < cursor_.ranges.count && begin_item();
  }

  /// Sets the cursor to the first item of this CTA's share; false where the share holds none.
  __device__ bool find_share() {
    const DecodePlan& plan = params_.plan;
    const int per_lane = (plan.num_queries + 31) / 32;
    const int begin = min(lane_ * per_lane, plan.num_queries);
    const int end = min(begin + per_lane, plan.num_queries);
    long long weight = 0;  // of this lane's queries
    for (int i = begin; i < end; ++i) weight += decode_ranges(plan, params_.queries[i].context).weight;
    weight *= plan.head_tiles;
    long long through = weight;  // of all queries up to this lane's last
    for (int step = 1; step < 32; step *= 2) {
      const long long other = __shfl_up_sync(~0u, through, step);
      if (lane_ >= step) through += other;
    }
    const long long total = __shfl_sync(~0u, through, 31);
    const DecodeShare share = decode_share(total, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    if (share.begin >= share.end) return false;
    share_end_ = share.end;

    const bool owner = through - weight <= share.begin && share.begin < through;
    int query = 0;
    DecodeQuery entry;
    long long start = through - weight;
    if (owner) {
      for (query = begin; query < end; ++query) {
        entry = params_.queries[query];
        const long long own = static_cast<long long>(decode_ranges(plan, entry.context).weight) * plan.head_tiles;
        if (share.begin < start + own) break;
        start += own;
      }
    }
    const int source = __ffs(static_cast<int>(__ballot_sync(~0u, owner))) - 1;
    query = __shfl_sync(~0u, query, source);
    entry.row = __shfl_sync(~0u, entry.row, source);
    entry.sequence = __shfl_sync(~0u, entry.sequence, source);
    entry.context = __shfl_sync(~0u, entry.context, source);
    start = __shfl_sync(~0u, start, source);
    cursor_.seek(plan, query, entry, start, share.begin);
    return begin_item();
  }

  __device__ bool begin_item() {
    item_valid_ = cursor_.start < share_end_ && cursor_.settle(params_.plan, params_.queries);
    if (!item_valid_) return false;
    const int range_begin = (cursor_.ranges.first + cursor_.range) * params_.plan.split_tokens;
    const int skipped = max(cursor_.ranges.begin - range_begin, 0) / Tile::kTokens * Tile::kTokens;
    position_ = range_begin + skipped;
    range_end_ = min(range_begin + params_.plan.split_tokens, cursor_.entry.context);
    first_tile_ = true;
    load_blocks();
    return true;
  }

  /// Lane i takes the i-th entry of the block table from `position_` on, of those that hold a position of the item and
  /// of the window: others may be anything.
  __device__ void load_blocks() {
    first_block_ = position_ >> params_.block_shift;
    const int block = first_block_ + lane_;
    const bool used =
        (block << params_.block_shift) < range_end_ && (block + 1) << params_.block_shift > cursor_.ranges.begin;
    const std::size_t row =
        static_cast<std::size_t>(cursor_.entry.sequence) * static_cast<std::size_t>(params_.table_stride);
    blocks_ = used ? params_.block_table[row + static_cast<std::size_t>(block)] : 0;
  }

  /// The next tile of the share.
  __device__ DecodeLoad next() {
    DecodeLoad load;
    if (!item_valid_) return load;
    load.valid = true;
    DecodeStageInfo& info = load.info;
    const int tiles = params_.tiles_per_kv_head;
    load.kv_head = tiles == 1 ? cursor_.head_tile : cursor_.head_tile / tiles;
    const int head_in_group = (cursor_.head_tile - load.kv_head * tiles) * params_.tile_heads;
    info.heads = min(params_.tile_heads, params_.group - head_in_group);
    info.head = load.kv_head * params_.group + head_in_group;
    info.begin = max(cursor_.ranges.begin - position_, 0);
    info.end = min(range_end_ - position_, Tile::kTokens);
    info.first = first_tile_;
    info.last = position_ + Tile::kTokens >= range_end_;
    info.row = cursor_.entry.row;
    info.query = cursor_.query;
    info.range = cursor_.range;
    info.ranges = cursor_.ranges.count;
    info.counter = cursor_.query * params_.plan.head_tiles + cursor_.head_tile;

    if (((position_ + Tile::kTokens - 1) >> params_.block_shift) - first_block_ >= 32) load_blocks();
    const int position = position_ + token_;
    const int block = position >> params_.block_shift;
    load.block = __shfl_sync(~0u, blocks_, (block - first_block_) & 31);
    load.block_row = position - (block << params_.block_shift);
    // Lanes beyond the boxes of a tile have token_ ≥ Tile::kTokens ≥ end.
    load.active = token_ < info.end && token_ + params_.box_tokens > info.begin;

    first_tile_ = false;
    if (info.last) {
      cursor_.advance(params_.plan);
      info.final = !begin_item();
    } else {
      position_ += Tile::kTokens;
    }
    return load;
  }

  __device__ void issue(const DecodeLoad& load) {
    using Barrier = cutlass::arch::ClusterTransactionBarrier;
    const int stage = phase_.stage;
    const int boxes = __popc(__ballot_sync(~0u, load.active));
    const std::uint32_t bytes = static_cast<std::uint32_t>(boxes * params_.box_tokens * Tile::kColumnBytes);
    constexpr int kHeadBytes = Tile::kHeadDim * 2;

    Barrier::wait(barriers_.empty_k(stage), phase_.parity ^ 1);
    if (lane_ == 0) {
      stage_info() = load.info;
      Barrier::arrive_and_expect_tx(barriers_.full_k(stage),
                                    bytes + (load.info.first ? load.info.heads * kHeadBytes : 0));
    }
    __syncwarp();
    if (load.info.first && lane_ < load.info.heads) {
      const std::size_t head = static_cast<std::size_t>(load.info.row) * params_.num_heads + load.info.head + lane_;
      std::uint8_t* to = shared_ + storage_.queries + (stage * params_.tile_heads + lane_) * Tile::kQueryStride;
      cute::SM90_BULK_COPY_G2S::copy(params_.q + head * Tile::kHeadDim, barriers_.full_k(stage), to, kHeadBytes);
    }
    if (load.active) copy_box(load, 0, barriers_.full_k(stage));

    Barrier::wait(barriers_.empty_v(stage), phase_.parity ^ 1);
    if (lane_ == 0) Barrier::arrive_and_expect_tx(barriers_.full_v(stage), bytes);
    __syncwarp();
    if (load.active) copy_box(load, 1, barriers_.full_v(stage));
    phase_.advance(params_.stages);
  }

  /// This lane's box of K (which = 0) or V (1).
  __device__ void copy_box(const DecodeLoad& load, int which, std::uint64_t* barrier) const {
    std::uint8_t* unit = shared_ + (2 * phase_.stage + which) * Tile::kUnitBytes;
    std::uint8_t* to = unit + (column_ * Tile::kTokens + token_) * Tile::kColumnBytes;
    constexpr int kColumnElements = Tile::kColumnBytes / static_cast<int>(element_bytes(Tile::kType));
    cute::SM90_TMA_LOAD_5D::copy(&map_, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST), to,
                                 column_ * kColumnElements, load.block_row, load.kv_head, which, load.block);
  }

  const DecodeParams& params_;
  const CUtensorMap& map_;
  std::uint8_t* shared_;
  DecodeStorage storage_;
  DecodeBarriers barriers_;
  int lane_;
  int column_;  ///< of this lane's box
  int token_;   ///< first of this lane's box, in a tile
  DecodeCursor cursor_;
  long long share_end_ = 0;
  int first_block_ = 0;  ///< of the sequence: that of blocks_ in lane 0
  std::int32_t blocks_ = 0;
  int position_ = 0;   ///< of the next tile
  int range_end_ = 0;  ///< of the item's positions
  bool first_tile_ = false;
  bool item_valid_ = false;
  DecodePhase phase_;
};

}  // namespace aotllm::cuda
