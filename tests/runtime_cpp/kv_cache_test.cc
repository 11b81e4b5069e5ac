#include "aotllm/kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "allocation_counter.h"
#include "aotllm/errors.h"
#include "slot_simulator.h"

namespace aotllm {

/// Makes keys collide, which hashes do not do in a test's time.
struct PrefixKeysPeer {
  static void set_all(PrefixKeys& keys, std::uint64_t key) { std::ranges::fill(keys.blocks_, key); }
};

namespace {

using Tokens = std::vector<TokenId>;
using testing::SlotSimulator;

constexpr std::int32_t kBlock = 4;

/// `count` tokens from `first` on: different texts have different tokens.
Tokens text(TokenId first, int count) {
  Tokens tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Tokens operator+(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// A cache with the memory that it directs. Each action checks what it can.
struct Fixture {
  explicit Fixture(std::vector<KvGroupConfig> groups, std::int32_t max_events = 0)
      : config{kBlock, std::move(groups), max_events}, kv(config), memory(config) {}

  struct Sequence {
    Tokens tokens;
    PrefixKeys keys;
    BlockTable table{};
    std::int32_t num_computed = 0;
    std::span<const TokenId> computed() const {
      return std::span(tokens).first(static_cast<std::size_t>(num_computed));
    }
  };

  PrefixKeys keys_of(const Tokens& tokens, const PrefixRealm& realm = {}) const {
    PrefixKeys keys(realm, kBlock);
    keys.extend(tokens);
    return keys;
  }
  std::int32_t hit(const Tokens& tokens, const PrefixRealm& realm = {}) const {
    return kv.match(keys_of(tokens, realm), tokens).num_tokens;
  }
  Sequence start(const Tokens& tokens, const PrefixRealm& realm = {}, std::int32_t retention = kDefaultRetention) {
    Sequence sequence{tokens, keys_of(tokens, realm)};
    sequence.num_computed = kv.acquire(sequence.table, sequence.keys, tokens, retention);
    memory.copy(kv.take_copies());
    memory.check(sequence.table, tokens, sequence.num_computed);
    return sequence;
  }
  void compute(Sequence& sequence, std::int32_t end) {
    kv.grow(sequence.table, sequence.num_computed, end);
    memory.copy(kv.take_copies());
    memory.check(sequence.table, sequence.tokens, sequence.num_computed);
    memory.write(sequence.table, sequence.tokens, sequence.num_computed, end);
    sequence.num_computed = end;
  }
  void step(Sequence& sequence, std::int32_t end) {
    compute(sequence, end);
    kv.commit(sequence.table, sequence.keys, sequence.computed());
    memory.check(sequence.table, sequence.tokens, sequence.num_computed);
  }
  void release(Sequence& sequence, std::int32_t retention = kDefaultRetention) {
    kv.release(sequence.table, sequence.keys, sequence.computed(), retention);
  }
  /// A whole life; returns what was cached.
  std::int32_t run(const Tokens& tokens, const PrefixRealm& realm = {}, std::int32_t retention = kDefaultRetention) {
    Sequence sequence = start(tokens, realm, retention);
    const std::int32_t cached = sequence.num_computed;
    compute(sequence, static_cast<std::int32_t>(tokens.size()));
    release(sequence, retention);
    kv.check_invariants({});
    return cached;
  }

  KvCacheConfig config;
  KvCache kv;
  SlotSimulator memory;
};

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

TEST(KvCache, HitsUpToTheLastTokenButOne) {
  struct Case {
    int stored, asked, hit;
  };
  for (const Case& c : std::vector<Case>{{4, 3, 2},
                                         {4, 4, 3},
                                         {4, 5, 4},
                                         {8, 7, 6},
                                         {8, 8, 7},
                                         {8, 9, 8},
                                         {8, 20, 8},
                                         {10, 20, 10},  // the partial block, too
                                         {10, 10, 9},
                                         {10, 1, 0},
                                         {1, 2, 1}}) {
    Fixture f({{0, 20, 0}});
    f.run(text(0, c.stored));
    EXPECT_EQ(f.run(text(0, c.asked)), c.hit) << c.asked << " of " << c.stored;
  }
}

TEST(KvCache, TakesTheLongestPartOfABlockAndOfEqualOnesTheLast) {
  Fixture f({{0, 20, 0}});
  f.run(text(0, 4) + Tokens{50, 60, 70, 80});
  f.run(text(0, 4) + Tokens{50, 61, 71, 81});
  EXPECT_EQ(f.hit(text(0, 4) + Tokens{50, 60, 1, 1, 1}), 6);
  EXPECT_EQ(f.hit(text(0, 4) + Tokens{50, 61, 71, 1, 1}), 7);
  EXPECT_EQ(f.hit(text(0, 4) + Tokens{50, 1, 1, 1, 1}), 5);
  const Tokens asked = text(0, 4) + Tokens{50, 1};
  Fixture::Sequence sequence{asked, f.keys_of(asked)};
  f.kv.acquire(sequence.table, sequence.keys, asked);
  const std::vector<BlockCopy> copies = f.kv.take_copies();
  ASSERT_EQ(copies.size(), 1U);
  const BlockId last_stored = 3;  // blocks are handed out from 0 on, and block 0 was shared
  EXPECT_EQ(copies[0].from, last_stored - 1);
  EXPECT_EQ(copies[0].to, sequence.table.blocks(0)[1]);
  f.kv.discard(sequence.table);
}

TEST(KvCache, KeepsPartialBlocksOnlyWhileNothingLongerCoversThem) {
  Fixture f({{0, 20, 0}});
  f.run(text(0, 2));
  EXPECT_EQ(f.kv.num_cached(0), 1);
  f.run(text(0, 3));
  EXPECT_EQ(f.kv.num_cached(0), 1);
  f.run(text(0, 2));
  EXPECT_EQ(f.kv.num_cached(0), 1);
  f.run(text(0, 4));
  EXPECT_EQ(f.kv.num_cached(0), 1);
  f.run(Tokens{0, 9});
  EXPECT_EQ(f.kv.num_cached(0), 2);
}

TEST(KvCache, MatchTellsWhatAcquireCosts) {
  Fixture f({{0, 20, 0}, {5, 20, 0}});
  const Tokens prompt = text(0, 14);
  f.run(prompt);
  const PrefixMatch all_cached = f.kv.match(f.keys_of(prompt), prompt);
  EXPECT_EQ(all_cached.num_tokens, 13);
  EXPECT_EQ(all_cached.num_blocks, (BlockCounts{4, 2}));  // token 13 sees 9 to 13 in the second group
  EXPECT_EQ(all_cached.cost, (BlockCounts{4, 2}));        // three pinned and a copy, one pinned and a copy
  Fixture::Sequence first = f.start(prompt);
  const PrefixMatch in_use = f.kv.match(f.keys_of(prompt), prompt);
  EXPECT_EQ(in_use.num_blocks, (BlockCounts{4, 2}));
  EXPECT_EQ(in_use.cost, (BlockCounts{1, 1}));
  f.release(first);
}

TEST(KvCache, TakesNoMoreThanItsLimit) {
  Fixture f({{0, 20, 0}});
  const Tokens prompt = text(0, 14);
  f.run(prompt);
  for (const std::int32_t limit : {-1, 0, 1, 4, 7, 13, 14, 100}) {
    BlockTable table;
    const PrefixKeys keys = f.keys_of(prompt);
    EXPECT_EQ(f.kv.acquire(table, keys, prompt, kDefaultRetention, limit), std::clamp(limit, 0, 13)) << limit;
    f.kv.discard(table);
  }
}

TEST(KvCache, SharesOnlyWithinARealm) {
  Fixture f({{0, 40, 0}});
  const std::vector<PrefixRealm> realms = {{0, ""}, {1, ""}, {0, "a"}, {1, "a"}, {0, "b"}};
  for (const PrefixRealm& realm : realms) {
    EXPECT_EQ(f.run(text(0, 10), realm), 0) << realm.adapter << realm.salt;
  }
  for (const PrefixRealm& realm : realms) {
    EXPECT_EQ(f.run(text(0, 10), realm), 9) << realm.adapter << realm.salt;
  }
}

TEST(KvCache, ComparesTokensWhereKeysCollide) {
  Fixture f({{0, 20, 0}});
  const std::vector<Tokens> prompts = {text(0, 9), text(100, 9), text(0, 4) + text(200, 5), text(4, 4) + text(0, 5)};
  std::vector<Fixture::Sequence> sequences;
  for (const Tokens& prompt : prompts) {
    Fixture::Sequence sequence{prompt, f.keys_of(prompt)};
    PrefixKeysPeer::set_all(sequence.keys, 7);
    const std::int32_t hit = f.kv.acquire(sequence.table, sequence.keys, prompt);
    EXPECT_EQ(hit, prompt == prompts[2] ? 4 : 0);
    sequence.num_computed = hit;
    f.step(sequence, 9);
    sequences.push_back(std::move(sequence));
  }
  while (!sequences.empty()) {
    EXPECT_EQ(f.kv.match(sequences.back().keys, sequences.back().tokens).num_tokens, 8);
    f.release(sequences.back());
    sequences.pop_back();
    std::vector<const BlockTable*> tables;
    for (const Fixture::Sequence& sequence : sequences) {
      tables.push_back(&sequence.table);
    }
    f.kv.check_invariants(tables);
  }
}

TEST(KvCache, GivesTwoSequencesOfEqualTokensTheSameBlocks) {
  Fixture f({{0, 20, 0}, {6, 20, 0}});
  const Tokens prompt = text(0, 9);
  Fixture::Sequence a = f.start(prompt), b = f.start(prompt);
  f.compute(a, 9);
  f.compute(b, 9);
  EXPECT_NE(a.table.blocks(0)[0], b.table.blocks(0)[0]);
  f.kv.commit(a.table, a.keys, a.computed());
  f.kv.commit(b.table, b.keys, b.computed());
  const std::vector<const BlockTable*> tables = {&a.table, &b.table};
  f.kv.check_invariants(tables);
  for (int group = 0; group < 2; ++group) {
    EXPECT_TRUE(std::ranges::equal(a.table.blocks(group).first(2), b.table.blocks(group).first(2)));
    EXPECT_NE(a.table.blocks(group)[2], b.table.blocks(group)[2]);
    EXPECT_EQ(f.kv.num_used(group), 4);
  }
  for (std::int32_t end = 10; end <= 30; ++end) {  // each goes on with its own tokens
    a.tokens.push_back(1000 + end);
    b.tokens.push_back(2000 + end);
    a.keys.extend(a.tokens);
    b.keys.extend(b.tokens);
    f.step(a, end);
    f.step(b, end);
    f.kv.check_invariants(tables);
  }
  f.release(a);
  f.release(b);
}

TEST(KvCache, KeepsTheChunksOfAnAbortedPrompt) {
  Fixture f({{0, 20, 0}});
  const Tokens prompt = text(0, 16);
  Fixture::Sequence aborted = f.start(prompt);
  f.step(aborted, 4);
  f.step(aborted, 8);
  f.compute(aborted, 12);  // this step fails
  f.kv.discard(aborted.table);
  f.kv.check_invariants({});
  EXPECT_EQ(f.kv.num_used(0), 0);
  EXPECT_EQ(f.run(prompt), 8);
}

TEST(KvCache, EvictsLeavesFirstAndWhatWasUsedLongestAgo) {
  Fixture f({{0, 6, 0}});
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
  Fixture f({{0, 4, 0}});
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
  Fixture f({{0, 4, 0}});
  f.run(text(0, 4), {}, kMinRetention);
  Fixture::Sequence sequence = f.start(text(0, 8), {}, kMinRetention);
  f.compute(sequence, 8);
  f.release(sequence, kMaxRetention);  // the second block; the first must not go before it
  f.run(text(100, 8));
  f.run(text(200, 8));
  EXPECT_EQ(f.hit(text(0, 9)), 8);
}

TEST(KvCache, DoesNotEvictWhatItCopiesFrom) {
  // Two blocks: a full one and, behind it, a partial one. A copy of the latter would need a third.
  Fixture f({{0, 2, 0}});
  f.run(text(0, 6));
  ASSERT_EQ(f.kv.num_cached(0), 2);
  EXPECT_EQ(f.hit(text(0, 8)), 4);
  EXPECT_EQ(f.run(text(0, 8)), 4);
  // With a third one there is.
  Fixture g({{0, 3, 0}});
  g.run(text(0, 6));
  EXPECT_EQ(g.run(text(0, 8)), 6);
}

TEST(KvCache, FreesBlocksThatLeaveTheWindow) {
  Fixture f({{5, 4, 0}});
  Fixture::Sequence sequence = f.start(text(0, 100));
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
      Fixture f(groups);
      Fixture::Sequence first = f.start(text(0, 42));
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
  Fixture f({{0, 20, 0}, {8, 3, 0}});
  Fixture::Sequence sequence = f.start(text(0, 16));
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
  Fixture f({{0, 3, 4}});
  f.run(text(0, 12));
  EXPECT_EQ(f.run(text(100, 12)), 0);
  EXPECT_EQ(f.kv.num_host_used(0), 3);
  EXPECT_EQ(f.run(text(0, 12)), 11);  // two blocks come back, the third is copied from where it is
  EXPECT_EQ(f.kv.stats().offloaded_blocks, 6);
  EXPECT_EQ(f.kv.stats().onloaded_blocks, 2);
  EXPECT_EQ(f.kv.stats().evicted_blocks, 0);
}

TEST(KvCache, ReadsAHostBlockBeforeItIsWrittenAgain) {
  Fixture f({{0, 2, 2}});
  f.run(text(0, 8));
  f.run(text(100, 8));  // the first prompt goes to the host, which is full
  Fixture::Sequence sequence{text(0, 9), f.keys_of(text(0, 9))};
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
  Fixture f({{0, 4, 8}});
  f.run(text(0, 16));
  Fixture::Sequence other = f.start(text(100, 12));
  f.compute(other, 12);  // three blocks move to the host, and one is left
  const PrefixMatch match = f.kv.match(f.keys_of(text(0, 20)), text(0, 20));
  EXPECT_EQ(match.num_tokens, 4);
  EXPECT_EQ(match.cost, (BlockCounts{1}));
  f.release(other);
  EXPECT_EQ(f.hit(text(0, 20)), 16);
}

TEST(KvCache, ForgetsAllOnClear) {
  Fixture f({{0, 12, 4}, {5, 12, 0}}, 100);
  f.run(text(100, 8));
  Fixture::Sequence kept = f.start(text(0, 12));
  f.step(kept, 8);
  Fixture::Sequence waiting = f.start(text(200, 9));  // has no blocks yet
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
  Fixture f({{0, 2, 1}}, 100);
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
  Fixture f({{0, 20, 0}}, 3);
  f.run(text(0, 20));
  const std::vector<KvEvent> events = f.kv.take_events();
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(events.front().id, 3U);
  EXPECT_EQ(events.back().id, 5U);
  EXPECT_TRUE(f.kv.take_events().empty());
}

TEST(KvCache, FindsABlockAmongAnyNumberOfSiblings) {
  constexpr int kSiblings = 200;
  Fixture f({{0, 2 * kSiblings, 0}});
  for (int i = 0; i < kSiblings; ++i) {
    f.run(text(0, 4) + text(1000 + 10 * i, 4));
  }
  for (int i = 0; i < kSiblings; ++i) {
    EXPECT_EQ(f.hit(text(0, 4) + text(1000 + 10 * i, 5)), 8) << i;
  }
  const int last = 1000 + 10 * (kSiblings - 1);
  EXPECT_EQ(f.hit(text(0, 4) + text(last, 2) + text(5, 2)), 6);
}

TEST(KvCache, GrowsByWhatIsMissing) {
  Fixture f({{0, 4, 0}});
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
  Fixture f({{4, 4, 0}});
  const Tokens prompt = text(0, 9);
  Fixture::Sequence a = f.start(prompt);
  f.step(a, 8);
  Fixture::Sequence b = f.start(prompt);
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
  Fixture f({{0, 4, 0}, {5, 3, 0}});
  Fixture::Sequence sequence = f.start(text(0, 30));
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
  Fixture f({{0, 4, 0}});
  BlockTable table;
  f.kv.grow(table, 0, 1);
  const std::vector<const BlockTable*> once = {&table}, twice = {&table, &table};
  EXPECT_NO_THROW(f.kv.check_invariants(once));
  EXPECT_THROW(f.kv.check_invariants({}), Error);
  EXPECT_THROW(f.kv.check_invariants(twice), Error);
  f.kv.discard(table);
}

TEST(BlockTable, LeavesNothingBehindWhenItMoves) {
  Fixture f({{0, 8, 0}});
  Fixture::Sequence sequence = f.start(text(0, 9));
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
  Fixture f({{0, 8, 0}, {6, 8, 0}});
  Fixture::Sequence sequence = f.start(text(0, 16));
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
  Fixture f({{0, 20, 0}});
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
