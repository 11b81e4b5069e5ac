#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "aotllm/kv_cache.h"
#include "aotllm/prefix_key.h"

namespace aotllm {

/// Index of a node; a removed node's is used again.
using NodeId = std::int32_t;
inline constexpr NodeId kNoNode = -1;

/// A block of tokens behind those of its ancestors. Links are the tree's; the rest is for whoever stores blocks in it.
/// One cache line, since finding a long prompt is waiting for these.
struct alignas(64) PrefixNode {
  std::uint64_t key = 0;
  const PrefixRealm* realm = nullptr;
  NodeId parent = kNoNode;
  NodeId first_child = kNoNode;  ///< the child used last; the others behind it, by `next`
  NodeId previous = kNoNode;
  NodeId next = kNoNode;
  NodeId next_in_bucket = kNoNode;
  std::int32_t num_tokens = 0;  ///< 0 for a root, tokens_per_block for a full node, between for a partial one

  std::int32_t holders = 0;  ///< sequences that go on from here
  std::array<BlockId, kMaxKvGroups> blocks = {kNoBlock, kNoBlock, kNoBlock, kNoBlock};
  std::uint8_t on_host = 0;  ///< bit g: blocks[g] is on the host
  std::int8_t retention = kMinRetention;
};
static_assert(sizeof(PrefixNode) == 64 && kMaxKvGroups == 4);

/// Token sequences, cut into blocks, that share what they begin with: a root per realm, a node per block.
///
/// Full nodes are found by key: the table of keys holds all of them, and a hit counts if parent and tokens agree.
/// Partial nodes are leaves, found among the children of their parent only. Not thread-safe, but for const methods.
class PrefixTree {
 public:
  /// Makes room for `expected_nodes`; more are possible.
  PrefixTree(std::int32_t tokens_per_block, std::size_t expected_nodes);

  /// The root of a realm, kNoNode if there is none.
  NodeId root(const PrefixRealm& realm) const;
  NodeId root_or_new(const PrefixRealm& realm);

  /// The full child of `parent` with these tokens, of which `key` is the key; kNoNode if there is none.
  NodeId find(NodeId parent, std::uint64_t key, std::span<const TokenId> block) const;

  /// The full nodes, from the root on, that hold the first blocks of `tokens`; at most keys.size() of them.
  std::vector<NodeId> walk(NodeId root, std::span<const std::uint64_t> keys, std::span<const TokenId> tokens) const;

  /// Makes sure that the next `nodes` calls of `add` do not throw.
  void reserve(std::size_t nodes);

  /// A new child, the first of its siblings: full if `block` has tokens_per_block tokens (then none like it may be
  /// there), else partial (1 token at least).
  NodeId add(NodeId parent, std::uint64_t key, std::span<const TokenId> block);

  /// Removes a node without children.
  void remove(NodeId node);

  /// Makes a node the first of its siblings.
  void move_to_front(NodeId node);

  /// Removes all nodes.
  void clear();

  PrefixNode& operator[](NodeId node) { return nodes_[static_cast<std::size_t>(node)]; }
  const PrefixNode& operator[](NodeId node) const { return nodes_[static_cast<std::size_t>(node)]; }
  std::span<const TokenId> tokens(NodeId node) const;
  bool is_root(NodeId node) const { return (*this)[node].parent == kNoNode; }
  bool is_full(NodeId node) const { return (*this)[node].num_tokens == tokens_per_block_; }
  std::int32_t tokens_per_block() const { return tokens_per_block_; }
  std::int32_t num_nodes() const { return static_cast<std::int32_t>(nodes_.size() - free_.size()); }

  /// All nodes, roots included, parents before their children.
  std::vector<NodeId> nodes() const;

  /// Links agree both ways, each full node is found by its key, siblings differ, partial nodes are leaves; else throws
  /// Error(kInternal).
  void check_invariants() const;

 private:
  struct RealmHash {
    std::size_t operator()(const PrefixRealm& realm) const noexcept;
  };

  std::size_t bucket(std::uint64_t key) const { return static_cast<std::size_t>(key) & (buckets_.size() - 1); }
  bool matches(NodeId node, NodeId parent, std::uint64_t key, std::span<const TokenId> block) const;
  void prefetch(NodeId node) const;
  void prefetch(std::span<const std::uint64_t> keys, std::size_t i) const;
  NodeId take_node();
  void index(NodeId node);
  void rehash(std::size_t num_buckets);
  void link_first(NodeId node);
  void unlink(NodeId node);

  std::int32_t tokens_per_block_;
  std::vector<PrefixNode> nodes_;  ///< by id
  std::vector<TokenId> tokens_;    ///< [ids, tokens_per_block]
  std::vector<NodeId> free_;       ///< ids without a node
  std::vector<NodeId> buckets_;    ///< a power of two of them; a full node is in that of its key
  std::unordered_map<PrefixRealm, NodeId, RealmHash> roots_;
};

}  // namespace aotllm
