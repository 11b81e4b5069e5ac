#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>

#include "aotllm/kv_cache.h"
#include "aotllm/prefix_key.h"
#include "aotllm/scheduler.h"

namespace aotllm::testing {

/// KvCache as SchedulerSimulator takes it, in place of CountedMemory.
class CachedMemory {
 public:
  struct Table {
    BlockTable blocks;
    PrefixKeys keys{{}, 1};
  };

  CachedMemory(const SchedulerConfig& config, const BlockCounts& total_blocks)
      : size_(config.tokens_per_block), kv_(cache_config(config, total_blocks)) {}

  Table make_table(std::span<const TokenId> tokens) const {
    Table table{{}, PrefixKeys({}, size_)};
    table.keys.extend(tokens);
    return table;
  }

  std::span<const std::uint64_t> block_keys(const Table& table) const { return table.keys.blocks(); }

  BlockCounts free_blocks() const {
    BlockCounts counts{};
    for (int group = 0; group < kv_.num_groups(); ++group) {
      counts[static_cast<std::size_t>(group)] = kv_.num_free(group);
    }
    return counts;
  }
  BlockCounts held(const Table& table) const { return table.blocks.num_blocks(); }
  BlockCounts shared(const Table& table) const {
    BlockCounts counts{};
    for_each_block(table, [&](std::size_t group, BlockId block) { counts[group] += holders_[group].at(block) > 1; });
    return counts;
  }

  PrefixMatch match(const Table& table, std::span<const TokenId> tokens) const { return kv_.match(table.keys, tokens); }
  std::int32_t acquire(Table& table, std::span<const TokenId> tokens) {
    std::int32_t matched = 0;
    change(table, [&] { matched = kv_.acquire(table.blocks, table.keys, tokens); });
    return matched;
  }
  void grow(Table& table, std::int32_t num_computed, std::int32_t num_tokens) {
    change(table, [&] { kv_.grow(table.blocks, num_computed, num_tokens); });
  }
  void commit(Table& table, std::span<const TokenId> computed) {
    change(table, [&] { kv_.commit(table.blocks, table.keys, computed); });
  }
  void release(Table& table, std::span<const TokenId> computed) {
    change(table, [&] { kv_.release(table.blocks, table.keys, computed); });
  }

 private:
  static KvCacheConfig cache_config(const SchedulerConfig& config, const BlockCounts& total_blocks) {
    KvCacheConfig cache{.tokens_per_block = config.tokens_per_block};
    for (std::size_t group = 0; group < config.windows.size(); ++group) {
      const std::int32_t host_blocks = config.tokens_per_block % 2 == 0 ? total_blocks[group] / 2 : 0;
      cache.groups.push_back({config.windows[group], total_blocks[group], host_blocks});
    }
    return cache;
  }

  template <class Visit>
  void for_each_block(const Table& table, Visit visit) const {
    for (int group = 0; group < kv_.num_groups(); ++group) {
      for (const BlockId block : table.blocks.blocks(group)) {
        if (block != kNoBlock) {
          visit(static_cast<std::size_t>(group), block);
        }
      }
    }
  }

  template <class Change>
  void change(Table& table, Change apply) {
    for_each_block(table, [&](std::size_t group, BlockId block) { --holders_[group][block]; });
    apply();
    for_each_block(table, [&](std::size_t group, BlockId block) { ++holders_[group][block]; });
    kv_.take_copies();
  }

  std::int32_t size_;  ///< tokens per block
  KvCache kv_;
  std::array<std::unordered_map<BlockId, std::int32_t>, kMaxKvGroups> holders_;  ///< tables that hold a block
};

}  // namespace aotllm::testing
