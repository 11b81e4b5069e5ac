#pragma once

#include <span>

#include "aotllm/kv_cache.h"
#include "kv/kv_store.h"
#include "kv/prefix_search.h"

namespace aotllm {

/// The sequences' side of the cache: what a BlockTable refers to.
class KvCache::Impl {
 public:
  explicit Impl(const KvCacheConfig& config) : store(config) {}

  BlockRange range(int group, std::int32_t num_computed, std::int32_t num_tokens) const {
    return blocks_in_step(num_computed, num_tokens, store.config().groups[static_cast<std::size_t>(group)].window,
                          store.config().tokens_per_block);
  }
  /// The table needs nothing for the step: the common case of a generation, in which no block edge is crossed.
  bool covers(const BlockTable& table, std::int32_t num_computed, std::int32_t num_tokens) const;
  void check_step(const BlockTable& table, std::int32_t num_computed, std::int32_t num_tokens) const;
  /// The first group with too few blocks for the step, -1 if all have enough.
  int short_group(const BlockTable& table, std::int32_t num_computed, std::int32_t num_tokens) const;

  void fill(BlockTable& table, const FoundPrefix& found);
  void fill_group(BlockTable::Group& table, const FoundPrefix& found, int group);
  void drop_before(BlockTable::Group& table, int group, std::int32_t begin);

  void check_computed(const BlockTable& table, const PrefixKeys& keys, std::span<const TokenId> computed,
                      std::int32_t retention) const;
  void commit(BlockTable& table, const PrefixKeys& keys, std::span<const TokenId> computed, std::int32_t retention);
  void store_tail(BlockTable& table, const PrefixRealm& realm, std::span<const TokenId> computed,
                  std::int32_t retention);
  void store_block(BlockTable& table, NodeId node, std::int32_t index, std::int32_t retention);
  void move_to(BlockTable& table, NodeId node);
  void give_back(BlockTable& table);
  void check_table(const BlockTable& table) const;

  KvStore store;
  std::int64_t epoch = 0;  ///< calls of `clear`
};

}  // namespace aotllm
