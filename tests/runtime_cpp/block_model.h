#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace aotllm::testing {

/// The KV blocks of one group as counts: what KvCache does, without memory, copies or tokens. Blocks that are full have
/// a key and may be shared; others belong to one sequence.
class BlockModel {
 public:
  /// Entry i stands for block i of a sequence: its key, or 0 for one of its own.
  struct Table {
    std::int32_t first = 0;  ///< entries before it have been given back
    std::vector<std::uint64_t> entries;

    std::int32_t held() const { return static_cast<std::int32_t>(entries.size()) - first; }
  };

  BlockModel(std::int32_t total, std::int32_t window, std::int32_t tokens_per_block)
      : total_(total), window_(window), tokens_per_block_(tokens_per_block) {}

  std::int32_t window() const { return window_; }
  std::int32_t total() const { return total_; }
  std::int32_t free() const { return total_ - in_use_; }
  bool has(std::uint64_t key) const { return references_.contains(key); }
  bool is_cached(std::uint64_t key) const { return cached_.contains(key); }

  /// Blocks of the table that others hold, too.
  std::int32_t shared(const Table& table) const {
    return static_cast<std::int32_t>(
        std::count_if(table.entries.begin() + table.first, table.entries.end(),
                      [this](std::uint64_t key) { return key != 0 && references_.at(key) > 1; }));
  }

  /// First block that a token at `position` sees.
  std::int32_t first_visible(std::int32_t position) const {
    return window_ == 0 ? 0 : std::max(position - window_ + 1, 0) / tokens_per_block_;
  }

  /// Fills an empty table with blocks of the tree up to `count`, the last `copied` of them as copies.
  void acquire(Table& table, const std::vector<std::uint64_t>& keys, std::int32_t position, std::int32_t count,
               std::int32_t copied) {
    table.first = first_visible(position);
    table.entries.assign(static_cast<std::size_t>(count), 0);
    for (std::int32_t i = table.first; i < count - copied; ++i) {
      const std::uint64_t key = table.entries[static_cast<std::size_t>(i)] = keys[static_cast<std::size_t>(i)];
      if (references_.at(key)++ == 0) {
        cached_.erase(key);
        ++in_use_;
      }
    }
    for (std::int32_t i = 0; i < copied; ++i) {
      take();
    }
    check();
  }

  /// Throws where there are too few blocks.
  void grow(Table& table, std::int32_t position, std::int32_t num_tokens) {
    for (; table.first < first_visible(position); ++table.first) {
      give_back(table.entries[static_cast<std::size_t>(table.first)]);
    }
    while (static_cast<std::int32_t>(table.entries.size()) * tokens_per_block_ < num_tokens) {
      take();
      table.entries.push_back(0);
    }
  }

  /// Puts full blocks [begin, end) of the table into the tree.
  void commit(Table& table, const std::vector<std::uint64_t>& keys, std::int32_t begin, std::int32_t end) {
    for (std::int32_t i = std::max(begin, table.first); i < end; ++i) {
      std::uint64_t& entry = table.entries[static_cast<std::size_t>(i)];
      if (entry != 0) {
        continue;
      }
      entry = keys[static_cast<std::size_t>(i)];
      if (cached_.erase(entry) == 0 && references_[entry] > 0) {
        --in_use_;  // takes the equal block that is in use, and gives its own back
      }
      ++references_[entry];
    }
    check();
  }

  void release(Table& table) {
    for (auto i = static_cast<std::size_t>(table.first); i < table.entries.size(); ++i) {
      give_back(table.entries[i]);
    }
    table = {};
  }

 private:
  void take() {
    if (free() == 0) {
      throw std::logic_error("a block is taken where none is free: the plan was not sound");
    }
    if (in_use_ + static_cast<std::int32_t>(cached_.size()) == total_) {  // evicts one
      references_.erase(*cached_.begin());
      cached_.erase(cached_.begin());
    }
    ++in_use_;
  }

  void give_back(std::uint64_t key) {
    if (key == 0) {
      --in_use_;
    } else if (--references_.at(key) == 0) {
      cached_.insert(key);
      --in_use_;
    }
  }

  void check() const {
    if (in_use_ < 0 || in_use_ + static_cast<std::int32_t>(cached_.size()) > total_) {
      throw std::logic_error("more blocks are in use or cached than there are");
    }
  }

  std::int32_t total_;
  std::int32_t window_;
  std::int32_t tokens_per_block_;
  std::int32_t in_use_ = 0;
  std::unordered_map<std::uint64_t, std::int32_t> references_;  ///< of blocks with a key
  std::set<std::uint64_t> cached_;                              ///< those without references
};

}  // namespace aotllm::testing
