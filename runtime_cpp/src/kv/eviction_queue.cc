#include "kv/eviction_queue.h"

#include <bit>

namespace aotllm {

static_assert(kMinRetention == 0 && kMaxRetention < 128, "a retention is the index of a list and of a bit");

EvictionQueue::EvictionQueue(std::int32_t num_blocks) : links_(static_cast<std::size_t>(num_blocks)) {}

void EvictionQueue::push(BlockId block, std::int32_t retention) {
  const auto level = static_cast<std::size_t>(retention);
  List& list = lists_[level];
  link(block) = {.previous = list.last, .next = kNoBlock};
  (list.last == kNoBlock ? list.first : link(list.last).next) = block;
  list.last = block;
  used_[level / 64] |= std::uint64_t{1} << level % 64;
  ++size_;
}

void EvictionQueue::remove(BlockId block, std::int32_t retention) {
  const auto level = static_cast<std::size_t>(retention);
  List& list = lists_[level];
  const Link found = link(block);
  (found.previous == kNoBlock ? list.first : link(found.previous).next) = found.next;
  (found.next == kNoBlock ? list.last : link(found.next).previous) = found.previous;
  if (list.first == kNoBlock) {
    used_[level / 64] &= ~(std::uint64_t{1} << level % 64);
  }
  --size_;
}

BlockId EvictionQueue::front() const {
  for (std::size_t word = 0; word < used_.size(); ++word) {
    if (used_[word] != 0) {
      return lists_[word * 64 + static_cast<std::size_t>(std::countr_zero(used_[word]))].first;
    }
  }
  return kNoBlock;
}

std::vector<BlockId> EvictionQueue::blocks() const {
  std::vector<BlockId> found;
  for (const List& list : lists_) {
    for (BlockId block = list.first; block != kNoBlock; block = links_[static_cast<std::size_t>(block)].next) {
      found.push_back(block);
    }
  }
  return found;
}

}  // namespace aotllm
