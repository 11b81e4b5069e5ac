#pragma once

#include <cstdint>
#include <vector>

#include "aotllm/model_runner.h"

namespace aotllm {

/// Who uses which KV block: reference counts and the list of free ones. Knows nothing of what blocks hold.
///
/// Not thread-safe. A misuse (no block left, releasing a free block) throws Error(kInternal).
class BlockPool {
 public:
  /// Block ids are [0, num_blocks).
  explicit BlockPool(std::int32_t num_blocks);

  /// Takes a free block; it has one reference.
  BlockId acquire();

  /// Adds a reference to a block in use.
  void share(BlockId block);

  /// Drops a reference; the block becomes free with the last one.
  void release(BlockId block);

  std::int32_t num_blocks() const { return static_cast<std::int32_t>(ref_counts_.size()); }
  std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
  std::int32_t num_used() const { return num_blocks() - num_free(); }
  std::int32_t ref_count(BlockId block) const;

  /// Free blocks are distinct and unreferenced, and free + in use = total; else throws Error(kInternal).
  void check_invariants() const;

 private:
  std::int32_t& count_in_use(BlockId block);

  std::vector<std::int32_t> ref_counts_;  ///< by block; 0 = free
  std::vector<BlockId> free_;             ///< a stack: the block freed last is the warmest in the CPU's caches
};

}  // namespace aotllm
