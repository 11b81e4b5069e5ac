#include "aotllm/kv_cache.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "allocation_counter.h"
#include "aotllm/errors.h"
#include "cached_texts.h"

namespace aotllm {
namespace {

using testing::CachedTexts;
using testing::kBlock;
using testing::text;
using testing::Tokens;

TEST(BlocksInStep, AreThoseThatItsTokensSee) {
  struct Case {
    std::int32_t computed, tokens, window, begin, end;
  };
  for (const Case& c : std::vector<Case>{{0, 0, 0, 0, 0},
                                         {0, 1, 0, 0, 1},
                                         {4, 4, 0, 0, 1},
                                         {4, 5, 0, 0, 2},
                                         {9, 10, 5, 1, 3},    // 9 sees 5 to 9
                                         {8, 10, 5, 1, 3},    // 8 sees 4 to 8
                                         {7, 10, 5, 0, 3},    // 7 sees 3 to 7
                                         {8, 9, 1, 2, 3},     // itself only
                                         {8, 8, 1, 2, 2}}) {  // and nothing of what is there
    const BlockRange found = blocks_in_step(c.computed, c.tokens, c.window, kBlock);
    EXPECT_EQ(found.begin, c.begin) << c.computed << " to " << c.tokens << ", window " << c.window;
    EXPECT_EQ(found.end, c.end) << c.computed << " to " << c.tokens << ", window " << c.window;
  }
}

TEST(KvCache, ForgetsAllOnClear) {
  CachedTexts f({{0, 12, 4}, {5, 12, 0}}, 100);
  f.run(text(100, 8));
  CachedTexts::Sequence kept = f.start(text(0, 12));
  f.step(kept, 8);
  CachedTexts::Sequence waiting = f.start(text(200, 9));  // has no blocks yet
  f.kv.clear();
  const std::vector<const BlockTable*> tables = {&kept.table, &waiting.table};
  f.kv.check_invariants(tables);
  EXPECT_EQ(f.kv.num_cached(0), 0);
  EXPECT_EQ(f.kv.num_used(0), 2);
  EXPECT_EQ(f.hit(text(0, 12)), 0);
  EXPECT_EQ(f.hit(text(100, 8)), 0);
  f.step(kept, 12);  // goes on, and leaves nothing behind
  f.step(waiting, 9);
  f.release(kept);
  f.release(waiting);
  EXPECT_EQ(f.hit(text(0, 12)), 0);
  EXPECT_EQ(f.hit(text(200, 9)), 8);
  f.kv.check_invariants({});
}

TEST(KvCache, TellsWhatHappensToFullBlocks) {
  CachedTexts f({{0, 2, 1}}, 100);
  const PrefixRealm realm{3, "s"};
  f.run(text(0, 8), realm);
  const PrefixKeys keys = f.keys_of(text(0, 8), realm);
  std::vector<KvEvent> events = f.kv.take_events();
  ASSERT_EQ(events.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(events[i].kind, KvEvent::Kind::kStored);
    EXPECT_EQ(events[i].id, i + 1);
    EXPECT_EQ(events[i].key, keys.blocks()[i]);
    EXPECT_EQ(events[i].parent_key, i == 0 ? 0 : keys.blocks()[0]);
    EXPECT_EQ(events[i].realm, realm);
    EXPECT_EQ(events[i].tokens, text(static_cast<TokenId>(4 * i), 4));
  }
  BlockTable table;
  f.kv.grow(table, 0, 8);
  std::string told;
  for (const KvEvent& event : f.kv.take_events()) {
    told += std::string(kv_event_kind_name(event.kind)) + (event.key == keys.blocks()[0] ? " 0" : " 1") +
            (event.tier == KvTier::kHost ? " host, " : " device, ");
  }
  EXPECT_EQ(told, "moved 1 host, removed 1 host, moved 0 host, ");
  f.kv.discard(table);
}

TEST(KvCache, DropsTheOldestEventsAndLeavesAGap) {
  CachedTexts f({{0, 20, 0}}, 3);
  f.run(text(0, 20));
  const std::vector<KvEvent> events = f.kv.take_events();
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(events.front().id, 3U);
  EXPECT_EQ(events.back().id, 5U);
  EXPECT_TRUE(f.kv.take_events().empty());
}

TEST(KvCache, GrowsByWhatIsMissing) {
  CachedTexts f({{0, 4, 0}});
  BlockTable table;
  f.kv.grow(table, 0, 5);
  ASSERT_EQ(table.num_blocks(), (BlockCounts{2}));
  const BlockId first = table.blocks(0)[0];
  f.kv.grow(table, 0, 8);
  EXPECT_EQ(table.num_blocks(), (BlockCounts{2}));
  f.kv.grow(table, 8, 9);
  EXPECT_EQ(table.num_blocks(), (BlockCounts{3}));
  EXPECT_EQ(table.blocks(0)[0], first);
  EXPECT_TRUE(f.kv.can_grow(table, 9, 16));
  EXPECT_FALSE(f.kv.can_grow(table, 9, 17));
  f.kv.discard(table);
}

TEST(KvCache, CountsWhatAnotherSequenceSeesAsNotFreed) {
  CachedTexts f({{4, 4, 0}});
  const Tokens prompt = text(0, 9);
  CachedTexts::Sequence a = f.start(prompt);
  f.step(a, 8);
  CachedTexts::Sequence b = f.start(prompt);
  ASSERT_EQ(b.num_computed, 8);
  BlockTable rest;
  f.kv.grow(rest, 0, 4 * f.kv.num_free(0));
  EXPECT_EQ(f.kv.num_free(0), 0);
  EXPECT_FALSE(f.kv.can_grow(b.table, 8, 17));
  EXPECT_THROW(f.kv.grow(b.table, 11, 12), Error);  // 8 are computed
  f.kv.discard(rest);
  f.kv.discard(a.table);
  f.kv.discard(b.table);
}

TEST(KvCache, RefusesMisuseAndStaysAsItWas) {
  CachedTexts f({{0, 4, 0}, {5, 3, 0}});
  CachedTexts::Sequence sequence = f.start(text(0, 30));
  f.step(sequence, 10);
  f.kv.grow(sequence.table, 10, 12);
  const std::vector<const BlockTable*> tables = {&sequence.table};
  const BlockCounts before = sequence.table.num_blocks();
  const PrefixKeys short_keys = f.keys_of(text(0, 3));
  EXPECT_THROW(f.kv.acquire(sequence.table, sequence.keys, sequence.tokens), Error);
  EXPECT_THROW(f.kv.grow(sequence.table, 10, 17), Error);  // no block left
  EXPECT_THROW(f.kv.grow(sequence.table, -1, 9), Error);
  EXPECT_THROW(f.kv.grow(sequence.table, 2, 12), Error);   // has left the window
  EXPECT_THROW(f.kv.grow(sequence.table, 13, 14), Error);  // more than the table covers
  EXPECT_THROW(f.kv.commit(sequence.table, short_keys, std::span(sequence.tokens).first(12)), Error);
  EXPECT_THROW(f.kv.commit(sequence.table, sequence.keys, std::span(sequence.tokens).first(13)), Error);
  EXPECT_THROW(f.kv.commit(sequence.table, sequence.keys, std::span(sequence.tokens).first(12), 101), Error);
  EXPECT_THROW(f.kv.release(sequence.table, sequence.keys, sequence.computed(), -1), Error);
  EXPECT_EQ(sequence.table.num_blocks(), before);
  EXPECT_NO_THROW(f.kv.check_invariants(tables));
  f.release(sequence);
  BlockTable table;
  EXPECT_THROW(f.kv.acquire(table, sequence.keys, sequence.tokens, 101), Error);
  EXPECT_TRUE(table.empty());
}

TEST(KvCache, RefusesConfigurationsThatMakeNoSense) {
  const std::vector<KvCacheConfig> configs = {{0, {{0, 1, 0}}, 0},   {4, {}, 0},           {4, {{0, 0, 0}}, 0},
                                              {4, {{-1, 1, 0}}, 0},  {4, {{0, 1, -1}}, 0}, {4, {{0, 1, 0}}, -1},
                                              {4, {5, {0, 1, 0}}, 0}};
  for (const KvCacheConfig& config : configs) {
    EXPECT_THROW(KvCache{config}, Error);
  }
}

TEST(KvCache, NoticesATableThatIsMissing) {
  CachedTexts f({{0, 4, 0}});
  BlockTable table;
  f.kv.grow(table, 0, 1);
  const std::vector<const BlockTable*> once = {&table}, twice = {&table, &table};
  EXPECT_NO_THROW(f.kv.check_invariants(once));
  EXPECT_THROW(f.kv.check_invariants({}), Error);
  EXPECT_THROW(f.kv.check_invariants(twice), Error);
  f.kv.discard(table);
}

TEST(BlockTable, LeavesNothingBehindWhenItMoves) {
  CachedTexts f({{0, 8, 0}});
  CachedTexts::Sequence sequence = f.start(text(0, 9));
  f.step(sequence, 9);
  BlockTable moved = std::move(sequence.table);
  EXPECT_TRUE(sequence.table.empty());  // NOLINT(bugprone-use-after-move): that is what is tested
  f.kv.discard(sequence.table);
  EXPECT_EQ(f.kv.acquire(sequence.table, sequence.keys, sequence.tokens), 8);
  const std::vector<const BlockTable*> tables = {&moved, &sequence.table};
  f.kv.check_invariants(tables);
  f.kv.discard(moved);
  f.kv.discard(sequence.table);
  f.kv.check_invariants({});
}

TEST(KvCache, AllocatesNothingInAStepWithinABlock) {
  CachedTexts f({{0, 8, 0}, {6, 8, 0}});
  CachedTexts::Sequence sequence = f.start(text(0, 16));
  f.step(sequence, 13);
  const auto before = testing_support::allocation_count();
  for (std::int32_t end = 14; end <= 15; ++end) {
    f.kv.grow(sequence.table, end - 1, end);
    f.kv.commit(sequence.table, sequence.keys, std::span(sequence.tokens).first(static_cast<std::size_t>(end)));
  }
  EXPECT_EQ(testing_support::allocation_count(), before);
  f.kv.discard(sequence.table);
}

TEST(KvCache, CountsHits) {
  CachedTexts f({{0, 20, 0}});
  f.run(text(0, 10));
  f.run(text(0, 14));
  const KvCacheStats& stats = f.kv.stats();
  EXPECT_EQ(stats.queried_tokens, 24);
  EXPECT_EQ(stats.hit_tokens, 10);
  EXPECT_EQ(stats.reused_blocks, 2);
  EXPECT_EQ(stats.copied_blocks, 1);
  EXPECT_EQ(stats.stored_blocks, 3);
  EXPECT_EQ(stats.evicted_blocks, 0);
}

}  // namespace
}  // namespace aotllm
