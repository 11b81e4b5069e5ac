#pragma once

#include <cstdint>
#include <vector>

#include "aotllm/model_runner.h"
#include "kv/eviction_queue.h"
#include "kv/prefix_tree.h"

namespace aotllm {

/// The blocks of one group on one tier: who refers to them, and which node of the prefix tree they belong to.
///
/// A block is *free* (no references, no node), *cached* (a node, no references; it waits in the eviction queue) or *in
/// use* (references, with or without a node). Not thread-safe. A misuse throws Error(kInternal) and changes nothing.
class BlockPool {
 public:
  /// Block ids are [0, num_blocks).
  explicit BlockPool(std::int32_t num_blocks);

  /// Takes a free block, which has one reference then; kNoBlock if there is none.
  BlockId take_free();

  /// Adds a reference.
  void share(BlockId block);

  /// Drops a reference; with the last one the block becomes cached, as the one used last, or free.
  void release(BlockId block);

  /// Gives a block in use to a node.
  void set_node(BlockId block, NodeId node, std::int32_t retention);

  /// Takes a block from its node; if it is cached it becomes free.
  void clear_node(BlockId block);

  /// Of a block with a node.
  void set_retention(BlockId block, std::int32_t retention);

  /// Makes a cached block the one used last.
  void touch(BlockId block);

  /// The cached block to give up next; kNoBlock if none is cached.
  BlockId victim() const { return queue_.front(); }

  std::int32_t num_blocks() const { return static_cast<std::int32_t>(blocks_.size()); }
  std::int32_t num_unused() const { return static_cast<std::int32_t>(free_.size()); }
  std::int32_t num_cached() const { return queue_.size(); }
  std::int32_t num_available() const { return num_unused() + num_cached(); }
  std::int32_t num_used() const { return num_blocks() - num_available(); }
  std::int32_t references(BlockId block) const { return at(block).references; }
  bool is_cached(BlockId block) const { return at(block).references == 0 && at(block).node != kNoNode; }
  NodeId node(BlockId block) const { return at(block).node; }

  /// The cached blocks in the order in which they are given up.
  std::vector<BlockId> cached() const { return queue_.blocks(); }

  /// Free blocks are distinct, unreferenced and without a node; the queue holds exactly the cached ones, by their
  /// retention; else throws Error(kInternal).
  void check_invariants() const;

 private:
  struct Block {
    std::int32_t references = 0;
    NodeId node = kNoNode;
    std::int32_t retention = 0;  ///< of the node
  };
  const Block& at(BlockId block) const;
  Block& at(BlockId block) { return const_cast<Block&>(static_cast<const BlockPool*>(this)->at(block)); }

  std::vector<Block> blocks_;
  std::vector<BlockId> free_;  ///< a stack: the block freed last is the warmest in the CPU's caches
  EvictionQueue queue_;
};

}  // namespace aotllm
