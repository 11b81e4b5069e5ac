#include "kv/block_pool.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

TEST(BlockPool, HandsOutEveryBlockOnce) {
  BlockPool pool(3);
  const std::set<BlockId> blocks = {pool.take_free(), pool.take_free(), pool.take_free()};
  EXPECT_EQ(blocks, (std::set<BlockId>{0, 1, 2}));
  EXPECT_EQ(pool.num_used(), 3);
  EXPECT_EQ(pool.take_free(), kNoBlock);
  pool.check_invariants();
}

TEST(BlockPool, FreesABlockWithItsLastReference) {
  BlockPool pool(1);
  const BlockId block = pool.take_free();
  pool.share(block);
  pool.release(block);
  EXPECT_EQ(pool.references(block), 1);
  EXPECT_EQ(pool.num_available(), 0);
  pool.release(block);
  EXPECT_EQ(pool.num_unused(), 1);
  EXPECT_EQ(pool.take_free(), block);
}

TEST(BlockPool, KeepsABlockOfANodeAsCached) {
  BlockPool pool(2);
  const BlockId block = pool.take_free();
  pool.set_node(block, 5, kDefaultRetention);
  EXPECT_FALSE(pool.is_cached(block));
  pool.release(block);
  EXPECT_TRUE(pool.is_cached(block));
  EXPECT_EQ(pool.victim(), block);
  EXPECT_EQ(pool.num_unused(), 1);
  EXPECT_EQ(pool.num_available(), 2);
  pool.share(block);
  EXPECT_EQ(pool.victim(), kNoBlock);
  pool.release(block);
  pool.clear_node(block);
  EXPECT_EQ(pool.num_unused(), 2);
  pool.check_invariants();
}

TEST(BlockPool, LetsABlockOutliveItsNode) {
  BlockPool pool(1);
  const BlockId block = pool.take_free();
  pool.set_node(block, 5, kDefaultRetention);
  pool.clear_node(block);
  EXPECT_EQ(pool.num_used(), 1);
  pool.release(block);
  EXPECT_EQ(pool.num_unused(), 1);
}

TEST(BlockPool, GivesUpLowRetentionFirstThenWhatWasUsedLongestAgo) {
  BlockPool pool(4);
  for (NodeId node = 0; node < 4; ++node) {
    const BlockId block = pool.take_free();
    pool.set_node(block, node, node == 0 ? kMaxRetention : kDefaultRetention);
    pool.release(block);
  }
  EXPECT_EQ(pool.cached(), (std::vector<BlockId>{1, 2, 3, 0}));
  pool.touch(1);
  EXPECT_EQ(pool.cached(), (std::vector<BlockId>{2, 3, 1, 0}));
  pool.set_retention(2, kMaxRetention);
  EXPECT_EQ(pool.cached(), (std::vector<BlockId>{3, 1, 0, 2}));
}

TEST(BlockPool, RefusesMisuseAndStaysAsItWas) {
  BlockPool pool(3);
  const BlockId used = pool.take_free();
  const BlockId cached = pool.take_free();
  pool.set_node(cached, 1, kDefaultRetention);
  pool.release(cached);
  EXPECT_THROW(pool.release(2), Error);   // free
  EXPECT_THROW(pool.share(2), Error);     // free
  EXPECT_THROW(pool.release(-1), Error);  // no such block
  EXPECT_THROW(pool.release(3), Error);
  EXPECT_THROW(pool.release(cached), Error);
  EXPECT_THROW(pool.touch(used), Error);
  EXPECT_THROW(pool.clear_node(used), Error);
  EXPECT_THROW(pool.set_node(cached, 2, kDefaultRetention), Error);
  EXPECT_THROW(pool.set_retention(used, 0), Error);
  pool.check_invariants();
  EXPECT_EQ(pool.num_used(), 1);
  EXPECT_EQ(pool.num_cached(), 1);
}

TEST(BlockPool, CountsLikeAMultisetUnderRandomUse) {
  std::mt19937 random(1);
  BlockPool pool(7);
  std::multiset<BlockId> references;
  std::set<BlockId> with_node;
  for (int i = 0; i < 20000; ++i) {
    const auto block = static_cast<BlockId>(random() % 7);
    const bool used = references.contains(block);
    switch (random() % 5) {
      case 0:
        if (const BlockId taken = pool.take_free(); taken != kNoBlock) {
          references.insert(taken);
        }
        break;
      case 1:
        if (used || with_node.contains(block)) {
          pool.share(block);
          references.insert(block);
        }
        break;
      case 2:
        if (used && !with_node.contains(block)) {
          pool.set_node(block, block, static_cast<std::int32_t>(random() % 101));
          with_node.insert(block);
        }
        break;
      case 3:
        if (with_node.erase(block) > 0) {
          pool.clear_node(block);
        }
        break;
      default:
        if (used) {
          pool.release(block);
          references.extract(block);
        }
    }
    pool.check_invariants();
    const std::set<BlockId> in_use(references.begin(), references.end());
    std::set<BlockId> not_free = in_use;
    not_free.insert(with_node.begin(), with_node.end());
    ASSERT_EQ(pool.num_used(), static_cast<std::int32_t>(in_use.size()));
    ASSERT_EQ(pool.num_unused(), 7 - static_cast<std::int32_t>(not_free.size()));
    for (BlockId b = 0; b < 7; ++b) {
      ASSERT_EQ(pool.references(b), static_cast<std::int32_t>(references.count(b)));
    }
  }
}

}  // namespace
}  // namespace aotllm
