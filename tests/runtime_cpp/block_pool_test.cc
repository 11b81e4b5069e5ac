#include "aotllm/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

TEST(BlockPool, HandsOutEveryBlockOnce) {
  BlockPool pool(3);
  const std::set<BlockId> blocks = {pool.acquire(), pool.acquire(), pool.acquire()};
  EXPECT_EQ(blocks, (std::set<BlockId>{0, 1, 2}));
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_THROW(pool.acquire(), Error);
  pool.check_invariants();
}

TEST(BlockPool, FreesABlockWithItsLastReference) {
  BlockPool pool(1);
  const BlockId block = pool.acquire();
  pool.share(block);
  pool.release(block);
  EXPECT_EQ(pool.ref_count(block), 1);
  EXPECT_EQ(pool.num_free(), 0);
  pool.release(block);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.acquire(), block);
}

TEST(BlockPool, RefusesMisuse) {
  EXPECT_THROW(BlockPool(0), Error);
  BlockPool pool(2);
  EXPECT_THROW(pool.release(0), Error);   // free
  EXPECT_THROW(pool.share(1), Error);     // free
  EXPECT_THROW(pool.release(-1), Error);  // no such block
  EXPECT_THROW(pool.release(2), Error);
  pool.check_invariants();
}

TEST(BlockPool, CountsLikeAMultisetUnderRandomUse) {
  std::mt19937 random(1);
  BlockPool pool(7);
  std::vector<BlockId> references;
  for (int i = 0; i < 20000; ++i) {
    const unsigned action = random() % 3;
    if (action == 0 && pool.num_free() > 0) {
      references.push_back(pool.acquire());
    } else if (!references.empty()) {
      const std::size_t pick = random() % references.size();
      if (action == 1 && references.size() < 30) {
        pool.share(references[pick]);
        references.push_back(references[pick]);
      } else {
        pool.release(references[pick]);
        references.erase(references.begin() + static_cast<std::ptrdiff_t>(pick));
      }
    }
    pool.check_invariants();
    ASSERT_EQ(pool.num_used(), static_cast<std::int32_t>(std::set(references.begin(), references.end()).size()));
    for (BlockId block = 0; block < pool.num_blocks(); ++block) {
      ASSERT_EQ(pool.ref_count(block), std::count(references.begin(), references.end(), block));
    }
  }
}

}  // namespace
}  // namespace aotllm
