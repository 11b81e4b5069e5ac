#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/kv_cache.h"
#include "aotllm/scheduler.h"
#include "block_model.h"

namespace aotllm::testing {

/// KV memory by counts, as SchedulerSimulator takes it: KvCache's contract, but that only whole blocks match (and all
/// tokens but the last). A table is made with all tokens that its sequence may come to have.
class CountedMemory {
 public:
  struct Table {
    std::vector<std::uint64_t> keys;  ///< of all blocks
    std::vector<BlockModel::Table> groups;
    std::int32_t committed = 0;  ///< blocks
  };

  CountedMemory(const SchedulerConfig& config, const BlockCounts& total_blocks) : size_(config.tokens_per_block) {
    for (std::size_t group = 0; group < config.windows.size(); ++group) {
      pools_.emplace_back(total_blocks[group], config.windows[group], size_);
    }
  }

  Table make_table(std::span<const TokenId> tokens) const {
    Table table{{}, std::vector<BlockModel::Table>(pools_.size())};
    std::uint64_t key = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      key = (key ^ (static_cast<std::uint64_t>(tokens[i]) + 1)) * 0x9e3779b97f4a7c15U;
      key ^= key >> 29U;
      if ((i + 1) % static_cast<std::size_t>(size_) == 0) {
        table.keys.push_back(key);
      }
    }
    return table;
  }

  std::span<const std::uint64_t> block_keys(const Table& table) const { return table.keys; }

  BlockCounts free_blocks() const {
    return by_group([&](std::size_t group) { return pools_[group].free(); });
  }
  BlockCounts held(const Table& table) const {
    return by_group([&](std::size_t group) { return table.groups[group].held(); });
  }
  BlockCounts shared(const Table& table) const {
    return by_group([&](std::size_t group) { return pools_[group].shared(table.groups[group]); });
  }

  PrefixMatch match(const Table& table, std::span<const TokenId> tokens) const {
    const auto num_tokens = static_cast<std::int32_t>(tokens.size());
    for (std::int32_t end = num_tokens / size_; end > 0; --end) {
      const std::int32_t matched = std::min(end * size_, num_tokens - 1);
      const auto holds = [&](const BlockModel& pool) {
        const auto begin = table.keys.begin() + pool.first_visible(matched);
        return std::all_of(begin, table.keys.begin() + end, [&](std::uint64_t key) { return pool.has(key); });
      };
      if (matched > 0 && std::all_of(pools_.begin(), pools_.end(), holds)) {
        return match_of(table, matched);
      }
    }
    return {};
  }

  std::int32_t acquire(Table& table, std::span<const TokenId> tokens) {
    const std::int32_t matched = match(table, tokens).num_tokens;
    for (std::size_t group = 0; group < pools_.size() && matched > 0; ++group) {
      pools_[group].acquire(table.groups[group], table.keys, matched, blocks_for(matched),
                            matched % size_ == 0 ? 0 : 1);
    }
    table.committed = matched / size_;
    return matched;
  }

  void grow(Table& table, std::int32_t num_computed, std::int32_t num_tokens) {
    for (std::size_t group = 0; group < pools_.size(); ++group) {
      pools_[group].grow(table.groups[group], num_computed, num_tokens);
    }
  }

  void commit(Table& table, std::span<const TokenId> computed) {
    const std::int32_t end = static_cast<std::int32_t>(computed.size()) / size_;
    for (std::size_t group = 0; group < pools_.size(); ++group) {
      pools_[group].commit(table.groups[group], table.keys, table.committed, end);
    }
    table.committed = end;
  }

  void release(Table& table, std::span<const TokenId> /*computed*/) {
    for (std::size_t group = 0; group < pools_.size(); ++group) {
      pools_[group].release(table.groups[group]);
    }
  }

 private:
  template <class Count>
  BlockCounts by_group(Count count) const {
    BlockCounts counts{};
    for (std::size_t group = 0; group < pools_.size(); ++group) {
      counts[group] = count(group);
    }
    return counts;
  }

  std::int32_t blocks_for(std::int32_t tokens) const { return (tokens + size_ - 1) / size_; }

  /// A partly covered last block is copied.
  PrefixMatch match_of(const Table& table, std::int32_t matched) const {
    PrefixMatch found{.num_tokens = matched};
    for (std::size_t group = 0; group < pools_.size(); ++group) {
      const std::int32_t first = pools_[group].first_visible(matched);
      const auto is_cached = [&](std::uint64_t key) { return pools_[group].is_cached(key); };
      found.num_blocks[group] = blocks_for(matched) - first;
      found.cost[group] = static_cast<std::int32_t>(std::count_if(table.keys.begin() + first,
                                                                  table.keys.begin() + matched / size_, is_cached)) +
                          (matched % size_ == 0 ? 0 : 1);
    }
    return found;
  }

  std::int32_t size_;  ///< tokens per block
  std::vector<BlockModel> pools_;
};

}  // namespace aotllm::testing
