#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"
#include "engine/plan.h"
#include "support/page_buffer.h"

namespace aotllm {

/// The KV blocks of one tier. For each layer the K of all its group's blocks, then their V, each block
/// `[num_kv_heads][one head's K or V]` in the kernels' layout (`cpu::AttentionArgs`). Blocks of a layer are equally far
/// apart, so that a kernel walks them by a block table and one stride.
class KvMemory {
 public:
  KvMemory() = default;
  /// Throws std::bad_alloc where the address space cannot be had. `num_blocks` as `kv_bytes` has found to be sound.
  KvMemory(const KvPlan& plan, const BlockCounts& num_blocks);

  /// Bytes from a block to the next.
  std::int64_t block_stride(int layer) const noexcept { return layers_[layer].block_stride; }
  std::uint8_t* k(int layer, BlockId block, int kv_head) const noexcept { return at(layers_[layer], block, kv_head); }
  std::uint8_t* v(int layer, BlockId block, int kv_head) const noexcept {
    return at(layers_[layer], layers_[layer].num_blocks + std::int64_t{block}, kv_head);
  }

 private:
  struct Layer {
    std::int64_t offset = 0;
    std::int64_t block_stride = 0;
    std::int64_t head_stride = 0;
    std::int64_t num_blocks = 0;
  };

  std::uint8_t* at(const Layer& layer, std::int64_t block, int kv_head) const noexcept {
    return memory_.data() + layer.offset + block * layer.block_stride + kv_head * layer.head_stride;
  }

  std::vector<Layer> layers_;
  PageBuffer memory_;
};

/// The KV memory of one rank: blocks of each group on the device, which steps use, and on the host, which only keeps
/// them.
class KvPool {
 public:
  KvPool() = default;
  /// `allocation` is sound (`checked_allocation`). Throws std::bad_alloc where the address space cannot be had.
  KvPool(const KvPlan& plan, const KvAllocation& allocation);

  /// Zero for groups that the plan does not have.
  const KvAllocation& allocation() const noexcept { return allocation_; }
  std::int64_t block_stride(int layer) const noexcept { return device_.block_stride(layer); }
  std::uint8_t* k(int layer, BlockId block, int kv_head) const noexcept { return device_.k(layer, block, kv_head); }
  std::uint8_t* v(int layer, BlockId block, int kv_head) const noexcept { return device_.v(layer, block, kv_head); }

  /// As ModelRunner::copy_blocks. Copies nothing where one of them is out of range.
  void copy_blocks(std::span<const BlockCopy> copies);

 private:
  const KvMemory& memory(KvTier tier) const noexcept { return tier == KvTier::kDevice ? device_ : host_; }

  std::vector<std::vector<int>> group_layers_;
  KvAllocation allocation_;
  KvMemory device_;
  KvMemory host_;
};

/// A pool for each rank, all of the same blocks. Throws Error(kInvalidRequest) for numbers of blocks that are not
/// positive (negative, on the host) or for which there is no memory.
std::vector<KvPool> make_kv_pools(const std::vector<const KvPlan*>& ranks, const KvAllocation& allocation);

}  // namespace aotllm
