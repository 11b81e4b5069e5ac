#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/kv_cache.h"
#include "kv/block_pool.h"
#include "kv/kv_event_log.h"
#include "kv/prefix_tree.h"

namespace aotllm {

/// Siblings that a search among the children of a node looks at: the ones used last. Bounds its time where thousands of
/// sequences go on from one prompt.
inline constexpr int kMaxSiblings = 64;

/// The prefix tree, the pools that the blocks of its nodes lie in, and what moves between them. Knows no sequences.
///
/// Invariants, for groups of full attention: each node but a root has a block; if it is on the device so are those of
/// all ancestors; whoever refers to a node's block refers to those of its ancestors, and drops them later. Retention
/// never rises from parent to child. So the block that was used longest ago, among those of the lowest retention, has
/// no cached block behind it on its tier, and eviction needs not look for leaves.
class KvStore {
 public:
  explicit KvStore(const KvCacheConfig& config);

  const KvCacheConfig& config() const { return config_; }
  int num_groups() const { return static_cast<int>(config_.groups.size()); }
  bool is_full_attention(int group) const { return config_.groups[static_cast<std::size_t>(group)].window == 0; }
  PrefixTree& tree() { return tree_; }
  const PrefixTree& tree() const { return tree_; }
  BlockPool& device(int group) { return device_[static_cast<std::size_t>(group)]; }
  const BlockPool& device(int group) const { return device_[static_cast<std::size_t>(group)]; }
  const BlockPool& host(int group) const { return host_[static_cast<std::size_t>(group)]; }
  KvCacheStats& stats() { return stats_; }
  const KvCacheStats& stats() const { return stats_; }
  KvEventLog& events() { return events_; }

  /// Makes sure that `take`, `onload` and `copy_to` do not throw for the next `blocks` blocks.
  void reserve_copies(std::size_t blocks);
  std::vector<BlockCopy> take_copies();

  /// A device block with one reference: a free one, or else the next to evict. Throws Error(kInternal) if there is
  /// none.
  BlockId take(int group);

  bool has_block(NodeId node, int group) const { return block(node, group) != kNoBlock; }
  bool on_device(NodeId node, int group) const {
    return has_block(node, group) && tier(node, group) == KvTier::kDevice;
  }
  BlockId block(NodeId node, int group) const { return tree_[node].blocks[static_cast<std::size_t>(group)]; }
  KvTier tier(NodeId node, int group) const {
    return (tree_[node].on_host >> group & 1) == 0 ? KvTier::kDevice : KvTier::kHost;
  }

  /// Refers to the node's block, on whichever tier; it stays there until `unpin`.
  void pin(NodeId node, int group) { pool(node, group).share(block(node, group)); }
  void unpin(NodeId node, int group) { pool(node, group).release(block(node, group)); }

  /// Moves the node's block, which is pinned on the host, to the device; the reference goes with it.
  BlockId onload(NodeId node, int group);

  /// Copies the node's block to a device block.
  void copy_to(NodeId node, int group, BlockId to);

  /// Gives the node a device block in use, for it has none in this group or one on the host, which is freed.
  void attach(NodeId node, int group, BlockId block);

  /// A new child; partial siblings that it makes needless go. Does not throw after tree().reserve(1).
  NodeId add(NodeId parent, std::uint64_t key, std::span<const TokenId> block);

  /// The child of `parent` that begins with `tokens`; kNoNode if there is none among the kMaxSiblings used last.
  NodeId find_beginning(NodeId parent, std::span<const TokenId> tokens) const;

  /// Raises the retention of the node, and of ancestors that would have a lower one.
  void raise_retention(NodeId node, std::int32_t retention);

  /// The node was used: its cached blocks are evicted last, and it is the first of its siblings.
  void touch(NodeId node);

  /// Removes the node, and then its ancestors, while they have neither blocks nor children nor holders.
  void remove_if_empty(NodeId node);

  /// Empties the tree.
  void clear();

  /// Throws Error(kInternal) where tree and pools disagree, or the invariants above are broken.
  void check_invariants() const;

 private:
  BlockPool& pool(NodeId node, int group) {
    return (tier(node, group) == KvTier::kDevice ? device_ : host_)[static_cast<std::size_t>(group)];
  }
  const BlockPool& pool(NodeId node, int group) const { return const_cast<KvStore*>(this)->pool(node, group); }
  void set_block(NodeId node, int group, KvTier tier, BlockId block);
  BlockId take_host(int group);
  void evict(int group);
  void lose(NodeId node, int group);
  void detach(NodeId node, int group);
  void drop(NodeId node);
  void check_node(NodeId node, int group) const;
  void check_eviction_order(int group, KvTier tier) const;

  KvCacheConfig config_;
  PrefixTree tree_;
  std::vector<BlockPool> device_;  ///< by group
  std::vector<BlockPool> host_;    ///< by group
  std::vector<BlockCopy> copies_;
  KvEventLog events_;
  KvCacheStats stats_;
};

}  // namespace aotllm
