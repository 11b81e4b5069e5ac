#include "aotllm/kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cached_texts.h"

namespace aotllm {
namespace {

using testing::CachedTexts;
using testing::kBlock;
using testing::operator+;
using testing::text;

TEST(KvCache, EvictsLeavesFirstAndWhatWasUsedLongestAgo) {
  CachedTexts f({{0, 6, 0}});
  f.run(text(0, 8));
  f.run(text(100, 8));
  f.run(text(0, 8));  // used again; takes a copy of the last block, which is equal
  EXPECT_EQ(f.kv.num_cached(0), 4);
  const auto hits = [&] { return std::pair(f.hit(text(0, 9)), f.hit(text(100, 9))); };
  std::vector<std::pair<int, int>> seen;
  std::vector<BlockTable> tables(4);
  for (BlockTable& table : tables) {
    f.kv.grow(table, 0, 8 - kBlock * (&table != &tables[0]));
    seen.push_back(hits());
  }
  EXPECT_EQ(seen, (std::vector<std::pair<int, int>>{{8, 8}, {8, 4}, {8, 0}, {4, 0}}));
  for (BlockTable& table : tables) {
    f.kv.discard(table);
  }
}

TEST(KvCache, EvictsByRetentionBeforeAge) {
  CachedTexts f({{0, 4, 0}});
  f.run(text(0, 4), {}, 60);
  f.run(text(100, 4), {}, kMaxRetention);
  f.run(text(200, 4), {}, kMinRetention);
  f.run(text(300, 4));
  std::string order;
  std::vector<BlockTable> tables(4);
  for (BlockTable& table : tables) {
    f.kv.grow(table, 0, 4);
    for (const TokenId first : {0, 100, 200, 300}) {
      order += f.hit(text(first, 5)) == 4 ? 'x' : '-';
    }
    order += ' ';
  }
  EXPECT_EQ(order, "xx-x xx-- -x-- ---- ");
  for (BlockTable& table : tables) {
    f.kv.discard(table);
  }
}

TEST(KvCache, GivesAPrefixTheRetentionOfWhatIsBehindIt) {
  CachedTexts f({{0, 4, 0}});
  f.run(text(0, 4), {}, kMinRetention);
  CachedTexts::Sequence sequence = f.start(text(0, 8), {}, kMinRetention);
  f.compute(sequence, 8);
  f.release(sequence, kMaxRetention);  // the second block; the first must not go before it
  f.run(text(100, 8));
  f.run(text(200, 8));
  EXPECT_EQ(f.hit(text(0, 9)), 8);
}

TEST(KvCache, DoesNotEvictWhatItCopiesFrom) {
  // Two blocks: a full one and, behind it, a partial one. A copy of the latter would need a third.
  CachedTexts f({{0, 2, 0}});
  f.run(text(0, 6));
  ASSERT_EQ(f.kv.num_cached(0), 2);
  EXPECT_EQ(f.hit(text(0, 8)), 4);
  EXPECT_EQ(f.run(text(0, 8)), 4);
  // With a third one there is.
  CachedTexts g({{0, 3, 0}});
  g.run(text(0, 6));
  EXPECT_EQ(g.run(text(0, 8)), 6);
}

TEST(KvCache, FreesBlocksThatLeaveTheWindow) {
  CachedTexts f({{5, 4, 0}});
  CachedTexts::Sequence sequence = f.start(text(0, 100));
  for (std::int32_t end = 1; end <= 100; ++end) {
    f.compute(sequence, end);  // not committed, so that what leaves is free
    EXPECT_LE(sequence.table.num_blocks()[0], 2);
    EXPECT_EQ(f.kv.num_cached(0), 0);
  }
  EXPECT_TRUE(std::ranges::all_of(sequence.table.blocks(0).first(23), [](BlockId block) { return block == kNoBlock; }));
  f.kv.discard(sequence.table);
}

TEST(KvCache, HitsTheSecondTimeOnAModelWithWindows) {
  for (const std::int32_t window : {1, 2, 4, 5, 8, 9}) {
    for (const bool full : {false, true}) {
      const std::vector<KvGroupConfig> groups =
          full ? std::vector<KvGroupConfig>{{0, 30, 0}, {window, 30, 0}} : std::vector<KvGroupConfig>{{window, 30, 0}};
      CachedTexts f(groups);
      CachedTexts::Sequence first = f.start(text(0, 42));
      for (std::int32_t end = 6; end <= 42; end += 6) {
        f.step(first, end);
      }
      f.release(first);
      EXPECT_EQ(f.run(text(0, 42)), 41) << window;
      EXPECT_EQ(f.run(text(0, 16) + text(100, 9)), 16) << window;  // branches off where blocks had left the window
    }
  }
}

TEST(KvCache, FallsBackToWhereAWholeWindowIsCached) {
  CachedTexts f({{0, 20, 0}, {8, 3, 0}});
  CachedTexts::Sequence sequence = f.start(text(0, 16));
  for (std::int32_t end = 4; end <= 16; end += 4) {
    f.step(sequence, end);
  }
  f.release(sequence);  // of the window group, blocks 1 to 3 are left
  EXPECT_EQ(f.hit(text(0, 17)), 16);
  EXPECT_EQ(f.hit(text(0, 9) + text(100, 3)), 0);  // 8 sees 1 to 8
  BlockTable other;
  f.kv.grow(other, 0, 4);             // takes the last block of the sequence
  EXPECT_EQ(f.hit(text(0, 17)), 12);  // 12 sees 5 to 12
  f.kv.grow(other, 0, 8);
  EXPECT_EQ(f.hit(text(0, 17)), 0);
  f.kv.discard(other);
}

TEST(KvCache, MovesEvictedBlocksToTheHostAndBack) {
  CachedTexts f({{0, 3, 4}});
  f.run(text(0, 12));
  EXPECT_EQ(f.run(text(100, 12)), 0);
  EXPECT_EQ(f.kv.num_host_used(0), 3);
  EXPECT_EQ(f.run(text(0, 12)), 11);  // two blocks come back, the third is copied from where it is
  EXPECT_EQ(f.kv.stats().offloaded_blocks, 6);
  EXPECT_EQ(f.kv.stats().onloaded_blocks, 2);
  EXPECT_EQ(f.kv.stats().evicted_blocks, 0);
}

TEST(KvCache, ReadsAHostBlockBeforeItIsWrittenAgain) {
  CachedTexts f({{0, 2, 2}});
  f.run(text(0, 8));
  f.run(text(100, 8));  // the first prompt goes to the host, which is full
  CachedTexts::Sequence sequence{text(0, 9), f.keys_of(text(0, 9))};
  sequence.num_computed = f.kv.acquire(sequence.table, sequence.keys, sequence.tokens);
  EXPECT_EQ(sequence.num_computed, 8);
  std::vector<BlockCopy> copies = f.kv.take_copies();
  const auto is_onload = [](const BlockCopy& copy) { return copy.from_tier == KvTier::kHost; };
  EXPECT_EQ(std::ranges::count_if(copies, is_onload), 2);
  const auto read = std::ranges::find_if(copies, is_onload);
  EXPECT_TRUE(std::any_of(read, copies.end(), [&](const BlockCopy& copy) {
    return copy.to_tier == KvTier::kHost && copy.to == read->from;
  })) << "the case that this test is for";
  f.memory.copy(copies);
  f.memory.check(sequence.table, sequence.tokens, 8);
  f.kv.discard(sequence.table);
}

TEST(KvCache, LoadsFromTheHostNoMoreThanThereIsRoomFor) {
  CachedTexts f({{0, 4, 8}});
  f.run(text(0, 16));
  CachedTexts::Sequence other = f.start(text(100, 12));
  f.compute(other, 12);  // three blocks move to the host, and one is left
  const PrefixMatch match = f.kv.match(f.keys_of(text(0, 20)), text(0, 20));
  EXPECT_EQ(match.num_tokens, 4);
  EXPECT_EQ(match.cost, (BlockCounts{1}));
  f.release(other);
  EXPECT_EQ(f.hit(text(0, 20)), 16);
}

}  // namespace
}  // namespace aotllm
