#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "aotllm/kv_cache.h"

namespace aotllm {

/// The order in which cached blocks of a pool are given up: by retention, then the one that was used longest ago.
///
/// One list per retention, linked through the blocks, and a bit per list: everything is O(1) and allocates nothing.
class EvictionQueue {
 public:
  /// For block ids in [0, num_blocks).
  explicit EvictionQueue(std::int32_t num_blocks);

  /// Adds a block as the one used last. It must not be in the queue.
  void push(BlockId block, std::int32_t retention);

  /// Takes a block out. It must be in the queue, with this retention.
  void remove(BlockId block, std::int32_t retention);

  /// The block to give up next, kNoBlock if the queue is empty.
  BlockId front() const;

  std::int32_t size() const { return size_; }

  /// All blocks, front first.
  std::vector<BlockId> blocks() const;

 private:
  static constexpr std::size_t kLevels = kMaxRetention - kMinRetention + 1;
  struct Link {
    BlockId previous = kNoBlock;
    BlockId next = kNoBlock;
  };
  struct List {
    BlockId first = kNoBlock;
    BlockId last = kNoBlock;
  };
  Link& link(BlockId block) { return links_[static_cast<std::size_t>(block)]; }

  std::vector<Link> links_;              ///< by block
  std::array<List, kLevels> lists_{};    ///< by retention
  std::array<std::uint64_t, 2> used_{};  ///< a bit for each list that is not empty
  std::int32_t size_ = 0;
};

}  // namespace aotllm
