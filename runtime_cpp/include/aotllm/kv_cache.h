#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "aotllm/kv_event.h"
#include "aotllm/model_runner.h"
#include "aotllm/prefix_key.h"

namespace aotllm {

/// Blocks of one group of layers.
struct KvGroupConfig {
  std::int32_t window = 0;           ///< tokens that a token sees, itself included; 0 = all
  std::int32_t num_blocks = 0;       ///< on the device; ≥ 1
  std::int32_t num_host_blocks = 0;  ///< 0 = evicted blocks are lost
};

struct KvCacheConfig {
  std::int32_t tokens_per_block = 0;
  std::vector<KvGroupConfig> groups{};  ///< as ModelShape::kv_groups
  std::int32_t max_events = 0;          ///< events kept for take_events, the oldest are dropped; 0 = none are made
};

/// Retention priorities of cached blocks; lower ones are evicted first.
inline constexpr std::int32_t kMinRetention = 0;
inline constexpr std::int32_t kDefaultRetention = 35;
inline constexpr std::int32_t kMaxRetention = 100;

/// The KV blocks of one sequence, by group: entry i holds positions [i · tokens_per_block, (i + 1) · tokens_per_block),
/// or is kNoBlock where the position has left the group's window.
///
/// Filled and emptied by KvCache only. Move-only, for each entry is a reference that is counted.
class BlockTable {
 public:
  BlockTable() = default;
  BlockTable(BlockTable&& other) noexcept { swap(other); }
  /// This table must be empty.
  BlockTable& operator=(BlockTable&& other) noexcept {
    swap(other);
    return *this;
  }

  std::span<const BlockId> blocks(int group) const { return groups_[static_cast<std::size_t>(group)].entries; }
  /// Blocks held, by group: entries that are not kNoBlock.
  BlockCounts num_blocks() const;
  bool empty() const;

 private:
  friend class KvCache;
  struct Group {
    std::vector<BlockId> entries;
    std::int32_t first = 0;  ///< entries before it are kNoBlock, those from it on are not
  };
  void swap(BlockTable& other) noexcept;

  std::array<Group, kMaxKvGroups> groups_;
  std::int32_t num_committed_ = 0;  ///< full blocks that are in the tree
  std::int32_t node_ = -1;          ///< the last of them, a node of the tree
  std::int64_t epoch_ = 0;          ///< calls of KvCache::clear before the table was filled
};

/// How much of a sequence is cached, and what taking it costs.
struct PrefixMatch {
  std::int32_t num_tokens = 0;  ///< < number of tokens: the last one's logits are always needed
  BlockCounts num_blocks{};     ///< blocks that the table holds after `acquire`
  BlockCounts cost{};  ///< by how much `acquire` lowers num_free: pinned cached blocks, copies, loads from host
};

/// Counters since the start; a block counts in each group.
struct KvCacheStats {
  std::int64_t queried_tokens = 0;  ///< tokens that sequences came with
  std::int64_t hit_tokens = 0;      ///< of those, tokens found in the tree
  std::int64_t stored_blocks = 0;   ///< full blocks put into the tree
  std::int64_t reused_blocks = 0;   ///< blocks that sequences took from the tree
  std::int64_t evicted_blocks = 0;  ///< lost, from whichever tier
  std::int64_t offloaded_blocks = 0;
  std::int64_t onloaded_blocks = 0;
  std::int64_t copied_blocks = 0;  ///< copy-on-write of partly matching blocks
};

/// Owns all KV blocks: hands them to sequences, and keeps what those leave behind in a prefix tree.
///
/// **A sequence** goes through `acquire` (when it is admitted), then `grow`, the step, `commit` for each of its steps,
/// and `release` (when it ends or is preempted).
///
/// **The tree** has one node per full block of tokens, found by its key and verified by its tokens, under a root per
/// realm. A node holds a block of each group, on the device or the host, or none where it was evicted (the window
/// groups') or never computed. A block is *in use* (sequences refer to it), *cached* (only the tree does) or *free*.
/// Partly filled last blocks are kept on `release`, too: a later sequence that shares the first tokens of a block, full
/// or not, gets a copy of it, since it will write behind them.
///
/// **Matching.** The longest prefix of which all blocks are there in the groups of full attention and, in a group with
/// a window, all blocks that the tokens from there on can see. Where fewer blocks are available than copies and loads
/// from the host need, a shorter one.
///
/// **Eviction** takes cached blocks, by retention priority, then least recently used; in groups of full attention never
/// one before its children on the same tier (so that what is left is reachable). With a host tier the block moves
/// there, in place of the host's first by the same order. A node that loses its block of a full-attention group for
/// good loses those of the other groups, too: nobody could use them. A node has the highest retention of those who used
/// it.
///
/// **Copies** that `acquire` and `grow` ask for are to be run in order before the next step: see `take_copies`. The
/// cache takes them as done; the steps and copies of the runner are one sequence in time. Where running them fails,
/// what sequences and the tree hold is in doubt: discard the tables and `clear`.
///
/// Not thread-safe; `match` may run beside other `const` methods. Misuse throws Error(kInternal).
class KvCache {
 public:
  explicit KvCache(const KvCacheConfig& config);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  /// What is cached of `tokens`, whose keys (of its full blocks at least) are `keys`. Changes nothing.
  PrefixMatch match(const PrefixKeys& keys, std::span<const TokenId> tokens) const;

  /// Fills the empty table with what is cached of `tokens` and returns how many tokens that covers,
  /// match(…).num_tokens. `limit` lowers it further: 0 takes nothing (logits of all prompt tokens are wanted).
  std::int32_t acquire(BlockTable& table, const PrefixKeys& keys, std::span<const TokenId> tokens,
                       std::int32_t retention = kDefaultRetention, std::int32_t limit = INT32_MAX);

  /// Makes the table cover positions [num_computed, num_tokens) and what those see: drops entries that have left a
  /// window, then takes free blocks, evicting cached ones. Throws Error(kInternal), with the table unchanged, where
  /// there are too few: see `can_grow`. num_computed never falls from one call to the next.
  void grow(BlockTable& table, std::int32_t num_computed, std::int32_t num_tokens);

  /// Whether the blocks that `grow` needs are available. What it drops counts as far as no other sequence uses it.
  bool can_grow(const BlockTable& table, std::int32_t num_computed, std::int32_t num_tokens) const;

  /// Blocks of the table that other tables hold, too, by group. Looks at each block.
  BlockCounts num_shared(const BlockTable& table) const;

  /// After a step: the full blocks of `computed`, the tokens whose K and V the table holds, can be reused from now on.
  /// Where the tree has an equal block already the table takes that and gives its own back.
  void commit(BlockTable& table, const PrefixKeys& keys, std::span<const TokenId> computed,
              std::int32_t retention = kDefaultRetention);

  /// As commit, with the partly filled last block; then gives all blocks of the table back, last to first.
  void release(BlockTable& table, const PrefixKeys& keys, std::span<const TokenId> computed,
               std::int32_t retention = kDefaultRetention);

  /// Gives all blocks of the table back without putting any into the tree: the step that was to fill them failed. What
  /// was committed before is sound and stays.
  void discard(BlockTable& table);

  /// Empties the tree: cached blocks become free. Those in use stay with their sequences, whose blocks never enter the
  /// tree any more: what was computed before is not reused.
  void clear();

  /// Copies since the last call, to be run in this order before the next step.
  std::vector<BlockCopy> take_copies();

  /// Events since the last call.
  std::vector<KvEvent> take_events();

  /// Blocks of a group that `grow` may take: free and cached ones.
  std::int32_t num_free(int group) const;
  std::int32_t num_cached(int group) const;
  std::int32_t num_used(int group) const;
  std::int32_t num_blocks(int group) const;
  std::int32_t num_host_used(int group) const;
  int num_groups() const;
  std::int32_t tokens_per_block() const;
  const KvCacheStats& stats() const;

  /// Tree, pools and references are consistent: free + cached + in use = total in each group and tier; the references
  /// of each block are exactly its places in `tables` (all live tables), and what two tables share is in the tree; no
  /// child without a parent; each full node is found by its key; evictable lists hold exactly the cached blocks,
  /// children before parents. Throws Error(kInternal) otherwise.
  void check_invariants(std::span<const BlockTable* const> tables) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Entries [begin, end) of a group that a table holds while tokens [num_computed, num_tokens) run: those that these
/// tokens are in or can see.
struct BlockRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t size() const { return end - begin; }
};
BlockRange blocks_in_step(std::int32_t num_computed, std::int32_t num_tokens, std::int32_t window,
                          std::int32_t tokens_per_block);

}  // namespace aotllm
