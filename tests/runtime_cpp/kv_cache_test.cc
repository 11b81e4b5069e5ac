#include "aotllm/kv_cache.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

const std::vector<TokenId> kPrompt = {5, 6, 7};

TEST(KvCache, CoversPositionsWithWholeBlocks) {
  const KvCache kv(1, 16);
  const std::vector<std::pair<std::int32_t, std::int32_t>> cases = {{0, 0}, {1, 1}, {15, 1}, {16, 1}, {17, 2}, {32, 2}};
  for (const auto& [tokens, blocks] : cases) {
    EXPECT_EQ(kv.blocks_for(tokens), blocks) << tokens;
  }
}

TEST(KvCache, GrowsByWhatIsMissingAndKeepsTheOrder) {
  KvCache kv(4, 2);
  BlockTable table;
  EXPECT_EQ(kv.acquire(table, kPrompt), 0);
  kv.grow(table, 3);
  ASSERT_EQ(table.size(), 2);
  const BlockId first = table.blocks()[0];
  kv.grow(table, 4);  // still within two blocks
  EXPECT_EQ(table.size(), 2);
  kv.grow(table, 5);
  EXPECT_EQ(table.size(), 3);
  EXPECT_EQ(table.blocks()[0], first);
  kv.grow(table, 1);  // never shrinks
  EXPECT_EQ(table.size(), 3);
}

TEST(KvCache, LeavesTheTableAloneWhereBlocksDoNotSuffice) {
  KvCache kv(2, 2);
  BlockTable table;
  kv.grow(table, 2);
  EXPECT_THROW(kv.grow(table, 6), Error);
  EXPECT_EQ(table.size(), 1);
  EXPECT_EQ(kv.num_free(), 1);
}

TEST(KvCache, RefusesToAcquireATableInUse) {
  KvCache kv(2, 2);
  BlockTable table;
  kv.grow(table, 1);
  EXPECT_THROW(kv.acquire(table, kPrompt), Error);
}

TEST(KvCache, NoticesATableThatIsMissing) {
  KvCache kv(2, 2);
  BlockTable table;
  kv.grow(table, 1);
  const BlockTable* tables[] = {&table};
  EXPECT_NO_THROW(kv.check_invariants(tables));
  EXPECT_THROW(kv.check_invariants({}), Error);
  const BlockTable* twice[] = {&table, &table};
  EXPECT_THROW(kv.check_invariants(twice), Error);
}

TEST(KvCache, NeverGivesABlockToTwoTablesUnderRandomUse) {
  std::mt19937 random(2);
  KvCache kv(13, 3);
  std::vector<BlockTable> tables(5);
  std::vector<const BlockTable*> views;
  for (const BlockTable& table : tables) {
    views.push_back(&table);
  }
  for (int i = 0; i < 5000; ++i) {
    BlockTable& table = tables[random() % tables.size()];
    const auto length = static_cast<std::int32_t>(random() % 20);
    if (random() % 4 == 0) {
      kv.release(table, {});
      EXPECT_EQ(table.size(), 0);
    } else if (kv.blocks_for(length) - table.size() <= kv.num_free()) {
      kv.grow(table, length);
      EXPECT_GE(table.size(), kv.blocks_for(length));
    }
    kv.check_invariants(views);
  }
  for (BlockTable& table : tables) {
    kv.release(table, {});
  }
  EXPECT_EQ(kv.num_free(), kv.num_blocks());
}

}  // namespace
}  // namespace aotllm
