#include "aotllm/kv_cache.h"

#include <string>

#include "aotllm/errors.h"

namespace aotllm {

KvCache::KvCache(std::int32_t num_blocks, std::int32_t tokens_per_block)
    : pool_(num_blocks), tokens_per_block_(tokens_per_block) {
  if (tokens_per_block < 1) {
    throw Error(ErrorKind::kInternal, "tokens_per_block is " + std::to_string(tokens_per_block) + "; it must be ≥ 1");
  }
}

std::int32_t KvCache::acquire(BlockTable& table, std::span<const TokenId> /*tokens*/) {
  if (table.size() != 0) {
    throw Error(ErrorKind::kInternal,
                "acquire on a block table that holds " + std::to_string(table.size()) + " blocks");
  }
  return 0;  // nothing is shared between sequences yet
}

void KvCache::grow(BlockTable& table, std::int32_t num_tokens) {
  const std::int32_t missing = blocks_for(num_tokens) - table.size();
  if (missing > pool_.num_free()) {
    throw Error(ErrorKind::kInternal, std::to_string(num_tokens) + " tokens need " + std::to_string(missing) +
                                          " more KV blocks; " + std::to_string(pool_.num_free()) + " are free");
  }
  if (missing > 0) {
    table.blocks_.reserve(static_cast<std::size_t>(table.size() + missing));
  }
  for (std::int32_t i = 0; i < missing; ++i) {
    table.blocks_.push_back(pool_.acquire());
  }
}

void KvCache::release(BlockTable& table, std::span<const TokenId> /*computed*/) {
  while (!table.blocks_.empty()) {
    pool_.release(table.blocks_.back());
    table.blocks_.pop_back();
  }
}

void KvCache::check_invariants(std::span<const BlockTable* const> tables) const {
  pool_.check_invariants();
  std::vector<std::int32_t> references(static_cast<std::size_t>(pool_.num_blocks()), 0);
  for (const BlockTable* table : tables) {
    for (const BlockId block : table->blocks()) {
      ++references.at(static_cast<std::size_t>(block));
    }
  }
  for (BlockId block = 0; block < pool_.num_blocks(); ++block) {
    const std::int32_t found = references[static_cast<std::size_t>(block)];
    if (found != pool_.ref_count(block)) {
      throw Error(ErrorKind::kInternal, "KV block " + std::to_string(block) + " stands in " + std::to_string(found) +
                                            " block tables, but counts " + std::to_string(pool_.ref_count(block)) +
                                            " references");
    }
  }
}

}  // namespace aotllm
