#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "aotllm/kv_cache.h"

namespace aotllm::testing {

/// KV memory that keeps tokens in place of K and V: runs the copies of a cache and the writes of steps, and tells
/// whether a table's blocks hold what a step would read. Catches any block that is wrong, stale, swapped or copied too
/// late.
class SlotSimulator {
 public:
  explicit SlotSimulator(const KvCacheConfig& config) : config_(config) {
    for (const KvGroupConfig& group : config.groups) {
      device_.emplace_back(static_cast<std::size_t>(group.num_blocks * config.tokens_per_block));
      host_.emplace_back(static_cast<std::size_t>(group.num_host_blocks * config.tokens_per_block));
    }
  }

  void copy(std::span<const BlockCopy> copies) {
    for (const BlockCopy& copy : copies) {
      for (std::int32_t i = 0; i < config_.tokens_per_block; ++i) {
        slot(copy.group, copy.to_tier, copy.to, i) = slot(copy.group, copy.from_tier, copy.from, i);
      }
    }
  }

  /// The step that computes tokens [begin, end).
  void write(const BlockTable& table, std::span<const TokenId> tokens, std::int32_t begin, std::int32_t end) {
    for (int group = 0; group < num_groups(); ++group) {
      for (std::int32_t position = begin; position < end; ++position) {
        at(table, group, position) = {tokens[static_cast<std::size_t>(position)], position};
      }
    }
  }

  /// Throws where a token at num_computed would not see exactly the tokens before it.
  void check(const BlockTable& table, std::span<const TokenId> tokens, std::int32_t num_computed) {
    for (int group = 0; group < num_groups(); ++group) {
      const std::int32_t window = config_.groups[static_cast<std::size_t>(group)].window;
      for (std::int32_t position = 0; position < num_computed; ++position) {
        if (window != 0 && position <= num_computed - window) {
          continue;
        }
        const Slot found = at(table, group, position);
        if (found.token != tokens[static_cast<std::size_t>(position)] || found.position != position) {
          throw std::logic_error("group " + std::to_string(group) + ", position " + std::to_string(position) + " of " +
                                 std::to_string(num_computed) + " holds token " + std::to_string(found.token) +
                                 " of position " + std::to_string(found.position));
        }
      }
    }
  }

 private:
  struct Slot {
    TokenId token = -1;
    std::int32_t position = -1;
  };

  int num_groups() const { return static_cast<int>(config_.groups.size()); }
  Slot& slot(int group, KvTier tier, BlockId block, std::int32_t i) {
    auto& slots = (tier == KvTier::kDevice ? device_ : host_)[static_cast<std::size_t>(group)];
    return slots.at(static_cast<std::size_t>(block * config_.tokens_per_block + i));
  }
  Slot& at(const BlockTable& table, int group, std::int32_t position) {
    const auto index = static_cast<std::size_t>(position / config_.tokens_per_block);
    return slot(group, KvTier::kDevice, table.blocks(group)[index], position % config_.tokens_per_block);
  }

  KvCacheConfig config_;
  std::vector<std::vector<Slot>> device_;  ///< by group: [blocks, tokens_per_block]
  std::vector<std::vector<Slot>> host_;
};

}  // namespace aotllm::testing
