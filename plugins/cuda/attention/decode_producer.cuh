#pragma once

#include "attention/decode_items.cuh"
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
  std::int32_t box_tokens = 0;
  std::int32_t token = 0;  ///< first of this lane's box, in the tile
  std::int32_t block = 0;  ///< of this lane's box
  std::int32_t block_row = 0;
  bool active = false;  ///< this lane has a box
  bool valid = false;   ///< there is a tile (the same in all lanes)
};

/// The producer warp: all lanes walk the CTA's items together, each lane issues one box of a tile.
template <class Tile>
class DecodeProducer {
 public:
  __device__ DecodeProducer(const DecodeParams& params, const DecodeMaps& maps, std::uint8_t* shared,
                            const DecodeStorage& storage)
      : params_(params),
        maps_(maps),
        shared_(shared),
        storage_(storage),
        barriers_{reinterpret_cast<std::uint64_t*>(shared + storage.barriers)},
        lane_(static_cast<int>(threadIdx.x) % 32),
        column_(lane_ % Tile::kColumns),
        items_(params) {}

  __device__ void run() {
    items_.begin();
    begin_item();
    for (DecodeLoad load = next(); load.valid; load = next()) issue(load);
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

  __device__ void begin_item() {
    if (!items_.valid()) return;
    const int range_begin = items_.range_begin();
    const int skipped = max(items_.begin_position() - range_begin, 0) / Tile::kTokens * Tile::kTokens;
    position_ = range_begin + skipped;
    range_end_ = items_.range_end();
    tile_ = 0;
    load_blocks();
  }

  /// Lane i takes the i-th entry of the block table from `position_` on, of those that hold a position of the item and
  /// of the window: others may be anything.
  __device__ void load_blocks() {
    first_block_ = position_ >> params_.block_shift;
    const int block = first_block_ + lane_;
    const bool used =
        (block << params_.block_shift) < range_end_ && (block + 1) << params_.block_shift > items_.begin_position();
    const std::size_t row =
        static_cast<std::size_t>(items_.entry().sequence) * static_cast<std::size_t>(params_.table_stride);
    blocks_ = used ? __ldcg(params_.block_table + row + static_cast<std::size_t>(block)) : 0;
  }

  /// The next tile of the share.
  __device__ DecodeLoad next() {
    DecodeLoad load;
    if (!items_.valid()) return load;
    load.valid = true;
    DecodeStageInfo& info = load.info;
    load.kv_head = items_.kv_head();
    info.heads = items_.heads();
    info.head = load.kv_head * params_.group + items_.head_in_group();
    info.begin = max(items_.begin_position() - position_, 0);
    info.end = min(range_end_ - position_, Tile::kTokens);
    info.tile = tile_++;
    info.last = position_ + Tile::kTokens >= range_end_;
    info.row = items_.entry().row;
    info.query = items_.query();
    info.range = items_.range();
    info.ranges = items_.ranges();
    info.counter = items_.counter();

    if (((position_ + Tile::kTokens - 1) >> params_.block_shift) - first_block_ >= 32) load_blocks();
    load.box_tokens = info.begin == 0 && info.end == Tile::kTokens ? params_.box_tokens : kDecodeSmallBox;
    load.token = lane_ / Tile::kColumns * load.box_tokens;
    const int position = position_ + load.token;
    const int block = position >> params_.block_shift;
    load.block = __shfl_sync(~0u, blocks_, (block - first_block_) & 31);
    load.block_row = position - (block << params_.block_shift);
    // Lanes beyond the boxes of a tile have a token ≥ Tile::kTokens ≥ end.
    load.active = load.token < info.end && load.token + load.box_tokens > info.begin;

    if (info.last) {
      items_.advance();
      info.final = !items_.valid();
      begin_item();
    } else {
      position_ += Tile::kTokens;
    }
    return load;
  }

  __device__ void issue(const DecodeLoad& load) {
    using Barrier = cutlass::arch::ClusterTransactionBarrier;
    const int stage = phase_.stage;
    const int boxes = __popc(__ballot_sync(~0u, load.active));
    const std::uint32_t bytes = static_cast<std::uint32_t>(boxes * load.box_tokens * Tile::kColumnBytes);
    constexpr int kHeadBytes = Tile::kHeadDim * 2;
    const bool queries = load.info.tile == 0 && !params_.fused;

    Barrier::wait(barriers_.empty_k(stage), phase_.parity ^ 1);
    if (lane_ == 0) {
      stage_info() = load.info;
      Barrier::arrive_and_expect_tx(barriers_.full_k(stage), bytes + (queries ? load.info.heads * kHeadBytes : 0));
    }
    __syncwarp();
    if (queries && lane_ < load.info.heads) {
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
    std::uint8_t* to = unit + (column_ * Tile::kTokens + load.token) * Tile::kColumnBytes;
    constexpr int kColumnElements = Tile::kColumnBytes / static_cast<int>(element_bytes(Tile::kType));
    const CUtensorMap& map = load.box_tokens == kDecodeSmallBox ? maps_.small : maps_.large;
    cute::SM90_TMA_LOAD_5D::copy(&map, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST), to,
                                 column_ * kColumnElements, load.block_row, load.kv_head, which, load.block);
  }

  const DecodeParams& params_;
  const DecodeMaps& maps_;
  std::uint8_t* shared_;
  DecodeStorage storage_;
  DecodeBarriers barriers_;
  int lane_;
  int column_;  ///< of this lane's box
  DecodeItems items_;
  int first_block_ = 0;  ///< of the sequence: that of blocks_ in lane 0
  std::int32_t blocks_ = 0;
  int position_ = 0;   ///< of the next tile
  int range_end_ = 0;  ///< of the item's positions
  int tile_ = 0;       ///< its number in the item
  DecodePhase phase_;
};

}  // namespace aotllm::cuda
