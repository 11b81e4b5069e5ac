#pragma once

#include <cstdint>
#include <vector>

#include "aotllm/model_runner.h"
#include "engine/plan.h"
#include "support/page_buffer.h"

namespace aotllm {

/// The KV memory of one rank: for each layer the K of all blocks, then their V, each block
/// `[num_kv_heads][head_dim · tokens_per_block]` in the kernels' layout (`cpu::AttentionArgs`). Blocks of a layer are
/// equally far apart, so a kernel walks them by a block table and one stride.
class KvPool {
 public:
  KvPool() = default;
  /// Throws Error(kInvalidRequest) for a number of blocks that is not positive or for which there is no memory.
  KvPool(const KvPlan& plan, std::int32_t num_blocks);

  std::int32_t num_blocks() const noexcept { return num_blocks_; }
  /// Bytes from a block to the next.
  std::int64_t block_stride(int layer) const noexcept { return layers_[layer].block_stride; }
  std::uint8_t* k(int layer, BlockId block, int kv_head) const noexcept { return at(layer, block, kv_head, 0); }
  std::uint8_t* v(int layer, BlockId block, int kv_head) const noexcept {
    return at(layer, block, kv_head, num_blocks_);
  }

  /// Throws Error(kInternal) for an id out of range.
  void copy_block(BlockId from, BlockId to);

 private:
  struct Layer {
    std::int64_t offset = 0;
    std::int64_t block_stride = 0;
    std::int64_t head_stride = 0;
  };

  std::uint8_t* at(int layer, BlockId block, int kv_head, std::int64_t first_block) const noexcept {
    const Layer& l = layers_[layer];
    return memory_.data() + l.offset + (first_block + block) * l.block_stride + kv_head * l.head_stride;
  }

  std::vector<Layer> layers_;
  PageBuffer memory_;
  std::int32_t num_blocks_ = 0;
};

}  // namespace aotllm
