#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"
#include "engine/plan.h"
#include "support/page_buffer.h"

namespace aotllm {

/// The KV blocks of one tier. A block of a group is all that its layers keep of its tokens, side by side: for each
/// layer K, then V, each `[num_kv_heads][one head's K or V]` in the kernels' layout (`cpu::AttentionArgs`). So the
/// pages of blocks that no token has come to yet are never touched and take no memory. Blocks of a group are equally
/// far apart, so that a kernel walks a layer's part of them by a block table and one stride.
class KvMemory {
 public:
  KvMemory() = default;
  /// Throws std::bad_alloc where the address space cannot be had. `num_blocks` as `kv_bytes` has found to be sound.
  KvMemory(const KvPlan& plan, const BlockCounts& num_blocks);

  /// Bytes from a block to the next.
  std::int64_t block_stride(int layer) const noexcept { return layers_[layer].block_stride; }
  std::uint8_t* k(int layer, BlockId block, int kv_head) const noexcept {
    const Layer& at = layers_[layer];
    return memory_.data() + at.offset + block * at.block_stride + kv_head * at.head_stride;
  }
  std::uint8_t* v(int layer, BlockId block, int kv_head) const noexcept {
    return k(layer, block, kv_head) + layers_[layer].bytes;
  }
  std::size_t num_groups() const noexcept { return groups_.size(); }
  /// All of a block.
  std::span<std::uint8_t> block(int group, BlockId block) const noexcept {
    const Group& at = groups_[group];
    return {memory_.data() + at.offset + block * at.block_stride, static_cast<std::size_t>(at.bytes)};
  }

 private:
  struct Group {
    std::int64_t offset = 0;
    std::int64_t block_stride = 0;
    std::int64_t bytes = 0;  ///< of a block
  };
  struct Layer {
    std::int64_t offset = 0;  ///< of K in block 0 of its group
    std::int64_t block_stride = 0;
    std::int64_t head_stride = 0;
    std::int64_t bytes = 0;  ///< of K in a block
  };

  std::vector<Group> groups_;
  std::vector<Layer> layers_;  ///< zero for those that are not held
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

  KvAllocation allocation_;
  KvMemory device_;
  KvMemory host_;
};

/// A pool for each rank, all of the same blocks. Throws Error(kInvalidRequest) for numbers of blocks that are not
/// positive (negative, on the host) or for which there is no memory.
std::vector<KvPool> make_kv_pools(const std::vector<const KvPlan*>& ranks, const KvAllocation& allocation);

}  // namespace aotllm
