#include "kv/eviction_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

namespace aotllm {
namespace {

TEST(EvictionQueue, PutsLowRetentionFirstAndThenWhatWasUsedLongestAgo) {
  EvictionQueue queue(5);
  EXPECT_EQ(queue.front(), kNoBlock);
  queue.push(3, kMaxRetention);
  queue.push(1, kDefaultRetention);
  queue.push(0, kMinRetention);
  queue.push(4, kDefaultRetention);
  queue.push(2, 64);
  EXPECT_EQ(queue.blocks(), (std::vector<BlockId>{0, 1, 4, 2, 3}));
  queue.remove(1, kDefaultRetention);
  queue.push(1, kDefaultRetention);
  EXPECT_EQ(queue.blocks(), (std::vector<BlockId>{0, 4, 1, 2, 3}));
}

TEST(EvictionQueue, IsASortedListUnderRandomUse) {
  std::mt19937 random(3);
  EvictionQueue queue(16);
  std::vector<std::pair<std::int32_t, BlockId>> expected;  // retention, block; stably sorted by retention
  for (int i = 0; i < 5000; ++i) {
    const auto block = static_cast<BlockId>(random() % 16);
    const auto found = std::ranges::find(expected, block, &std::pair<std::int32_t, BlockId>::second);
    if (found != expected.end()) {
      queue.remove(block, found->first);
      expected.erase(found);
    } else {
      const auto retention = static_cast<std::int32_t>(random() % 101);
      queue.push(block, retention);
      expected.emplace_back(retention, block);
      std::ranges::stable_sort(expected, {}, &std::pair<std::int32_t, BlockId>::first);
    }
    std::vector<BlockId> blocks;
    for (const auto& [retention, listed] : expected) {
      blocks.push_back(listed);
    }
    ASSERT_EQ(queue.blocks(), blocks);
    ASSERT_EQ(queue.front(), blocks.empty() ? kNoBlock : blocks.front());
    ASSERT_EQ(queue.size(), static_cast<std::int32_t>(blocks.size()));
  }
}

}  // namespace
}  // namespace aotllm
