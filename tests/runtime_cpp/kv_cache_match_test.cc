#include "aotllm/kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cached_texts.h"

namespace aotllm {

/// Makes keys collide, which hashes do not do in a test's time.
struct PrefixKeysPeer {
  static void set_all(PrefixKeys& keys, std::uint64_t key) { std::ranges::fill(keys.blocks_, key); }
};

namespace {

using testing::CachedTexts;
using testing::operator+;
using testing::text;
using testing::Tokens;

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
    CachedTexts f({{0, 20, 0}});
    f.run(text(0, c.stored));
    EXPECT_EQ(f.run(text(0, c.asked)), c.hit) << c.asked << " of " << c.stored;
  }
}

TEST(KvCache, TakesTheLongestPartOfABlockAndOfEqualOnesTheLast) {
  CachedTexts f({{0, 20, 0}});
  f.run(text(0, 4) + Tokens{50, 60, 70, 80});
  f.run(text(0, 4) + Tokens{50, 61, 71, 81});
  EXPECT_EQ(f.hit(text(0, 4) + Tokens{50, 60, 1, 1, 1}), 6);
  EXPECT_EQ(f.hit(text(0, 4) + Tokens{50, 61, 71, 1, 1}), 7);
  EXPECT_EQ(f.hit(text(0, 4) + Tokens{50, 1, 1, 1, 1}), 5);
  const Tokens asked = text(0, 4) + Tokens{50, 1};
  CachedTexts::Sequence sequence{asked, f.keys_of(asked)};
  f.kv.acquire(sequence.table, sequence.keys, asked);
  const std::vector<BlockCopy> copies = f.kv.take_copies();
  ASSERT_EQ(copies.size(), 1U);
  const BlockId last_stored = 3;  // blocks are handed out from 0 on, and block 0 was shared
  EXPECT_EQ(copies[0].from, last_stored - 1);
  EXPECT_EQ(copies[0].to, sequence.table.blocks(0)[1]);
  f.kv.discard(sequence.table);
}

TEST(KvCache, KeepsPartialBlocksOnlyWhileNothingLongerCoversThem) {
  CachedTexts f({{0, 20, 0}});
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
  CachedTexts f({{0, 20, 0}, {5, 20, 0}});
  const Tokens prompt = text(0, 14);
  f.run(prompt);
  const PrefixMatch all_cached = f.kv.match(f.keys_of(prompt), prompt);
  EXPECT_EQ(all_cached.num_tokens, 13);
  EXPECT_EQ(all_cached.num_blocks, (BlockCounts{4, 2}));  // token 13 sees 9 to 13 in the second group
  EXPECT_EQ(all_cached.cost, (BlockCounts{4, 2}));        // three pinned and a copy, one pinned and a copy
  CachedTexts::Sequence first = f.start(prompt);
  const PrefixMatch in_use = f.kv.match(f.keys_of(prompt), prompt);
  EXPECT_EQ(in_use.num_blocks, (BlockCounts{4, 2}));
  EXPECT_EQ(in_use.cost, (BlockCounts{1, 1}));
  f.release(first);
}

TEST(KvCache, TakesNoMoreThanItsLimit) {
  CachedTexts f({{0, 20, 0}});
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
  CachedTexts f({{0, 40, 0}});
  const std::vector<PrefixRealm> realms = {{0, ""}, {1, ""}, {0, "a"}, {1, "a"}, {0, "b"}};
  for (const PrefixRealm& realm : realms) {
    EXPECT_EQ(f.run(text(0, 10), realm), 0) << realm.adapter << realm.salt;
  }
  for (const PrefixRealm& realm : realms) {
    EXPECT_EQ(f.run(text(0, 10), realm), 9) << realm.adapter << realm.salt;
  }
}

TEST(KvCache, ComparesTokensWhereKeysCollide) {
  CachedTexts f({{0, 20, 0}});
  const std::vector<Tokens> prompts = {text(0, 9), text(100, 9), text(0, 4) + text(200, 5), text(4, 4) + text(0, 5)};
  std::vector<CachedTexts::Sequence> sequences;
  for (const Tokens& prompt : prompts) {
    CachedTexts::Sequence sequence{prompt, f.keys_of(prompt)};
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
    for (const CachedTexts::Sequence& sequence : sequences) {
      tables.push_back(&sequence.table);
    }
    f.kv.check_invariants(tables);
  }
}

TEST(KvCache, GivesTwoSequencesOfEqualTokensTheSameBlocks) {
  CachedTexts f({{0, 20, 0}, {6, 20, 0}});
  const Tokens prompt = text(0, 9);
  CachedTexts::Sequence a = f.start(prompt), b = f.start(prompt);
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
  CachedTexts f({{0, 20, 0}});
  const Tokens prompt = text(0, 16);
  CachedTexts::Sequence aborted = f.start(prompt);
  f.step(aborted, 4);
  f.step(aborted, 8);
  f.compute(aborted, 12);  // this step fails
  f.kv.discard(aborted.table);
  f.kv.check_invariants({});
  EXPECT_EQ(f.kv.num_used(0), 0);
  EXPECT_EQ(f.run(prompt), 8);
}

TEST(KvCache, FindsABlockAmongAnyNumberOfSiblings) {
  constexpr int kSiblings = 200;
  CachedTexts f({{0, 2 * kSiblings, 0}});
  for (int i = 0; i < kSiblings; ++i) {
    f.run(text(0, 4) + text(1000 + 10 * i, 4));
  }
  for (int i = 0; i < kSiblings; ++i) {
    EXPECT_EQ(f.hit(text(0, 4) + text(1000 + 10 * i, 5)), 8) << i;
  }
  const int last = 1000 + 10 * (kSiblings - 1);
  EXPECT_EQ(f.hit(text(0, 4) + text(last, 2) + text(5, 2)), 6);
}

}  // namespace
}  // namespace aotllm
