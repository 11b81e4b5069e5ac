#include "kv/block_pool.h"

#include <numeric>
#include <string>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

void require(bool holds, BlockId block, const char* rule) {
  if (!holds) {
    throw Error(ErrorKind::kInternal, "KV block " + std::to_string(block) + " " + rule);
  }
}

}  // namespace

BlockPool::BlockPool(std::int32_t num_blocks)
    : blocks_(static_cast<std::size_t>(num_blocks)), free_(blocks_.size()), queue_(num_blocks) {
  std::iota(free_.rbegin(), free_.rend(), 0);
}

const BlockPool::Block& BlockPool::at(BlockId block) const {
  if (block < 0 || block >= num_blocks()) {
    throw Error(ErrorKind::kInternal,
                "there is no KV block " + std::to_string(block) + " among " + std::to_string(num_blocks()));
  }
  return blocks_[static_cast<std::size_t>(block)];
}

BlockId BlockPool::take_free() {
  if (free_.empty()) {
    return kNoBlock;
  }
  const BlockId block = free_.back();
  free_.pop_back();
  at(block).references = 1;
  return block;
}

void BlockPool::share(BlockId block) {
  Block& shared = at(block);
  require(shared.references > 0 || shared.node != kNoNode, block, "is free and cannot be shared");
  if (shared.references++ == 0) {
    queue_.remove(block, shared.retention);
  }
}

void BlockPool::release(BlockId block) {
  Block& released = at(block);
  require(released.references > 0, block, "is not in use and cannot be released");
  if (--released.references > 0) {
    return;
  }
  if (released.node == kNoNode) {
    free_.push_back(block);  // never allocates: the capacity is that of all blocks
  } else {
    queue_.push(block, released.retention);
  }
}

void BlockPool::set_node(BlockId block, NodeId node, std::int32_t retention) {
  Block& given = at(block);
  require(given.references > 0 && given.node == kNoNode, block, "is not in use, or belongs to a node already");
  given.node = node;
  given.retention = retention;
}

void BlockPool::clear_node(BlockId block) {
  Block& taken = at(block);
  require(taken.node != kNoNode, block, "belongs to no node");
  taken.node = kNoNode;
  if (taken.references == 0) {
    queue_.remove(block, taken.retention);
    free_.push_back(block);
  }
}

void BlockPool::set_retention(BlockId block, std::int32_t retention) {
  Block& changed = at(block);
  require(changed.node != kNoNode, block, "belongs to no node");
  if (changed.references == 0) {
    queue_.remove(block, changed.retention);
    queue_.push(block, retention);
  }
  changed.retention = retention;
}

void BlockPool::touch(BlockId block) {
  require(is_cached(block), block, "is not cached");
  queue_.remove(block, at(block).retention);
  queue_.push(block, at(block).retention);
}

void BlockPool::check_invariants() const {
  std::vector<bool> listed(blocks_.size(), false);
  const auto list_once = [&](BlockId block) {
    const Block& found = at(block);
    require(!listed[static_cast<std::size_t>(block)], block, "is listed twice");
    require(found.references == 0, block, "is listed as free or cached, but in use");
    listed[static_cast<std::size_t>(block)] = true;
  };
  for (const BlockId block : free_) {
    list_once(block);
    require(node(block) == kNoNode, block, "is free, but belongs to a node");
  }
  std::int32_t retention = kMinRetention;
  for (const BlockId block : cached()) {
    list_once(block);
    require(node(block) != kNoNode, block, "is queued for eviction, but belongs to no node");
    require(at(block).retention >= retention, block, "is queued for eviction after blocks of a higher retention");
    retention = at(block).retention;
  }
  require(static_cast<std::int32_t>(cached().size()) == num_cached(), victim(), "and others are miscounted");
  for (BlockId block = 0; block < num_blocks(); ++block) {
    require(references(block) >= 0, block, "has a negative number of references");
    require(listed[static_cast<std::size_t>(block)] == (references(block) == 0), block, "is lost");
  }
}

}  // namespace aotllm
