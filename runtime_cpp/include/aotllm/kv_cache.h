#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/block_pool.h"
#include "aotllm/model_runner.h"

namespace aotllm {

/// The KV blocks of one sequence: entry i holds positions [i · tokens_per_block, (i + 1) · tokens_per_block).
///
/// Filled and emptied by KvCache only. Move-only, for each entry is a reference that is counted.
class BlockTable {
 public:
  BlockTable() = default;
  BlockTable(BlockTable&&) noexcept = default;
  BlockTable& operator=(BlockTable&&) noexcept = default;

  std::span<const BlockId> blocks() const { return blocks_; }
  std::int32_t size() const { return static_cast<std::int32_t>(blocks_.size()); }

 private:
  friend class KvCache;
  std::vector<BlockId> blocks_;
};

/// Owns all KV blocks and hands them to sequences.
///
/// A sequence goes through `acquire` (when it is admitted), `grow` (before each of its steps) and `release` (when it
/// ends or is preempted). `acquire` and `release` see the tokens: a prefix tree finds shared blocks in the one and
/// keeps them in the other. Not thread-safe.
class KvCache {
 public:
  KvCache(std::int32_t num_blocks, std::int32_t tokens_per_block);

  /// Starts an empty table for a sequence that knows `tokens`. Returns how many of them, from the first on, need not
  /// be computed since their blocks are in the table now; never all: the last token's logits are always needed.
  std::int32_t acquire(BlockTable& table, std::span<const TokenId> tokens);

  /// Extends the table to cover positions [0, num_tokens). Throws Error(kInternal), with the table unchanged, where the
  /// pool has too few free blocks: the scheduler plans with `num_free`, so that this is a fault of its own.
  void grow(BlockTable& table, std::int32_t num_tokens);

  /// Gives all blocks of the table back, last to first. `computed` are the tokens whose K and V they hold.
  void release(BlockTable& table, std::span<const TokenId> computed);

  /// Blocks that cover `num_tokens` positions.
  std::int32_t blocks_for(std::int32_t num_tokens) const {
    return (num_tokens + tokens_per_block_ - 1) / tokens_per_block_;
  }

  std::int32_t tokens_per_block() const { return tokens_per_block_; }
  std::int32_t num_blocks() const { return pool_.num_blocks(); }
  std::int32_t num_free() const { return pool_.num_free(); }
  std::int32_t num_used() const { return pool_.num_used(); }

  /// Pool invariants, and: the references of each block are exactly its places in `tables` (all live tables). Throws
  /// Error(kInternal) otherwise.
  void check_invariants(std::span<const BlockTable* const> tables) const;

 private:
  BlockPool pool_;
  std::int32_t tokens_per_block_;
};

}  // namespace aotllm
