#include "aotllm/block_pool.h"

#include <numeric>
#include <string>

#include "aotllm/errors.h"

namespace aotllm {

BlockPool::BlockPool(std::int32_t num_blocks) {
  if (num_blocks < 1) {
    throw Error(ErrorKind::kInternal,
                "a block pool of " + std::to_string(num_blocks) + " blocks; at least 1 is needed");
  }
  ref_counts_.resize(static_cast<std::size_t>(num_blocks), 0);
  free_.resize(ref_counts_.size());
  std::iota(free_.rbegin(), free_.rend(), 0);
}

BlockId BlockPool::acquire() {
  if (free_.empty()) {
    throw Error(ErrorKind::kInternal, "no free KV block of " + std::to_string(num_blocks()));
  }
  const BlockId block = free_.back();
  free_.pop_back();
  ref_counts_[static_cast<std::size_t>(block)] = 1;
  return block;
}

void BlockPool::share(BlockId block) {
  ++count_in_use(block);
}

void BlockPool::release(BlockId block) {
  if (--count_in_use(block) == 0) {
    free_.push_back(block);  // never allocates: the capacity is that of all blocks
  }
}

std::int32_t BlockPool::ref_count(BlockId block) const {
  return ref_counts_.at(static_cast<std::size_t>(block));
}

std::int32_t& BlockPool::count_in_use(BlockId block) {
  if (block < 0 || block >= num_blocks() || ref_counts_[static_cast<std::size_t>(block)] == 0) {
    throw Error(ErrorKind::kInternal, "KV block " + std::to_string(block) + " is not in use");
  }
  return ref_counts_[static_cast<std::size_t>(block)];
}

void BlockPool::check_invariants() const {
  std::vector<bool> seen(ref_counts_.size(), false);
  for (const BlockId block : free_) {
    const auto i = static_cast<std::size_t>(block);
    if (block < 0 || i >= seen.size() || seen[i] || ref_counts_[i] != 0) {
      throw Error(ErrorKind::kInternal,
                  "block pool: free block " + std::to_string(block) + " is listed twice or in use");
    }
    seen[i] = true;
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (seen[i] == (ref_counts_[i] > 0) || ref_counts_[i] < 0) {
      throw Error(ErrorKind::kInternal, "block pool: block " + std::to_string(i) + " is neither free nor in use");
    }
  }
}

}  // namespace aotllm
