// Random use of the KV cache: against a naive model of what it promises, and against memory that it directs.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "aotllm/kv_cache.h"
#include "naive_kv_cache.h"
#include "slot_simulator.h"

namespace aotllm {
namespace {

using testing::NaiveKvCache;
using testing::SlotSimulator;
using Tokens = std::vector<TokenId>;

const std::vector<PrefixRealm> kRealms = {{0, ""}, {0, "salt"}, {1, ""}};
constexpr std::int32_t kMaxLength = 22;

struct Sequence {
  Sequence(int realm_, Tokens tokens_, std::int32_t block_size)
      : realm(realm_), tokens(std::move(tokens_)), keys(kRealms[static_cast<std::size_t>(realm_)], block_size) {
    keys.extend(tokens);
  }
  std::span<const TokenId> computed() const { return std::span(tokens).first(static_cast<std::size_t>(num_computed)); }

  int realm;
  Tokens tokens;
  PrefixKeys keys;
  BlockTable table{};
  NaiveKvCache::Table naive{};
  std::int32_t num_computed = 0;
};

/// Does the same to a KvCache and to its model, and compares them.
class Play {
 public:
  Play(const KvCacheConfig& config, unsigned seed)
      : config_(config), cache_(config), naive_(config), memory_(config), random_(seed) {
    for (Tokens& text : texts_) {
      text = random_tokens(kMaxLength);
    }
  }

  void run(int num_actions) {
    for (int i = 0; i < num_actions; ++i) {
      act();
      check();
      if (::testing::Test::HasFatalFailure()) {
        return;
      }
    }
    while (!sequences_.empty()) {
      finish(0);
      check();
    }
    for (int group = 0; group < cache_.num_groups(); ++group) {
      EXPECT_EQ(cache_.num_used(group), 0);
    }
  }

  const KvCacheStats& stats() const { return cache_.stats(); }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  Tokens random_tokens(std::int32_t length) {
    Tokens tokens;
    for (std::int32_t i = 0; i < length; ++i) {
      tokens.push_back(below(2));
    }
    return tokens;
  }

  void act() {
    const int action = below(100);
    if (sequences_.empty() || (action < 20 && sequences_.size() < 5)) {
      start();
    } else if (action < 88) {
      step(*sequences_[static_cast<std::size_t>(below(static_cast<int>(sequences_.size())))]);
    } else if (action < 99) {
      finish(static_cast<std::size_t>(below(static_cast<int>(sequences_.size()))));
    } else {
      clear();
    }
  }

  void start() {
    Tokens tokens = texts_[static_cast<std::size_t>(below(3))];
    tokens.resize(static_cast<std::size_t>(1 + below(kMaxLength)));
    if (below(3) == 0) {
      std::ranges::copy(random_tokens(2), std::back_inserter(tokens));
    }
    const int realm = below(5) == 0 ? 1 + below(2) : 0;
    auto sequence = std::make_unique<Sequence>(realm, tokens, config_.tokens_per_block);
    const std::int32_t retention = some_retention();
    const std::int32_t limit = below(8) == 0 ? below(kMaxLength) : INT32_MAX;
    const PrefixMatch promised = cache_.match(sequence->keys, tokens);
    std::vector<std::int32_t> free;
    for (int group = 0; group < cache_.num_groups(); ++group) {
      free.push_back(cache_.num_free(group));
    }
    sequence->num_computed = cache_.acquire(sequence->table, sequence->keys, tokens, retention, limit);
    ASSERT_EQ(sequence->num_computed, naive_.acquire(sequence->naive, realm, tokens, retention, limit));
    ASSERT_LT(sequence->num_computed, static_cast<std::int32_t>(tokens.size()));
    if (limit == INT32_MAX) {
      ASSERT_EQ(promised.num_tokens, sequence->num_computed);
      ASSERT_EQ(promised.num_blocks, sequence->table.num_blocks());
      for (int group = 0; group < cache_.num_groups(); ++group) {
        const auto g = static_cast<std::size_t>(group);
        ASSERT_EQ(cache_.num_free(group), free[g] - promised.cost[g]);
      }
    }
    memory_.copy(cache_.take_copies());
    ASSERT_NO_THROW(memory_.check(sequence->table, tokens, sequence->num_computed));
    sequences_.push_back(std::move(sequence));
  }

  void step(Sequence& sequence) {
    if (sequence.num_computed == static_cast<std::int32_t>(sequence.tokens.size())) {
      if (sequence.num_computed == kMaxLength + 4) {
        return;
      }
      sequence.tokens.push_back(below(2));
      sequence.keys.extend(sequence.tokens);
    }
    const std::int32_t begin = sequence.num_computed;
    const std::int32_t end = std::min(begin + 1 + below(7), static_cast<std::int32_t>(sequence.tokens.size()));
    ASSERT_EQ(cache_.can_grow(sequence.table, begin, end), naive_.can_grow(sequence.naive, begin, end));
    if (!cache_.can_grow(sequence.table, begin, end)) {
      const BlockCounts before = sequence.table.num_blocks();
      ASSERT_THROW(cache_.grow(sequence.table, begin, end), Error);
      ASSERT_EQ(sequence.table.num_blocks(), before);
      return;
    }
    cache_.grow(sequence.table, begin, end);
    naive_.grow(sequence.naive, begin, end);
    memory_.copy(cache_.take_copies());
    ASSERT_NO_THROW(memory_.check(sequence.table, sequence.tokens, begin));
    memory_.write(sequence.table, sequence.tokens, begin, end);
    sequence.num_computed = end;
    if (below(4) != 0) {
      const std::int32_t retention = some_retention();
      cache_.commit(sequence.table, sequence.keys, sequence.computed(), retention);
      naive_.commit(sequence.naive, {sequence.computed().begin(), sequence.computed().end()}, retention);
      ASSERT_NO_THROW(memory_.check(sequence.table, sequence.tokens, end));
    }
  }

  void finish(std::size_t index) {
    Sequence& sequence = *sequences_[index];
    if (below(4) == 0) {
      cache_.discard(sequence.table);
      naive_.discard(sequence.naive);
    } else {
      const std::int32_t retention = some_retention();
      cache_.release(sequence.table, sequence.keys, sequence.computed(), retention);
      naive_.release(sequence.naive, {sequence.computed().begin(), sequence.computed().end()}, retention);
    }
    ASSERT_TRUE(sequence.table.empty());
    sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void clear() {
    cache_.clear();
    std::vector<NaiveKvCache::Table*> tables;
    for (const auto& sequence : sequences_) {
      tables.push_back(&sequence->naive);
    }
    naive_.clear(tables);
  }

  std::int32_t some_retention() {
    constexpr std::int32_t kSome[] = {kDefaultRetention, kDefaultRetention, kMinRetention, 64, kMaxRetention};
    return kSome[below(5)];
  }

  void check() {
    std::vector<const BlockTable*> tables;
    for (const auto& sequence : sequences_) {
      tables.push_back(&sequence->table);
    }
    ASSERT_NO_THROW(cache_.check_invariants(tables));
    for (int group = 0; group < cache_.num_groups(); ++group) {
      ASSERT_EQ(cache_.num_used(group), naive_.num_used(group));
      ASSERT_EQ(cache_.num_cached(group), naive_.num_cached(group));
      ASSERT_EQ(cache_.num_host_used(group), naive_.num_cached(group, KvTier::kHost));
      ASSERT_EQ(cache_.num_free(group) + cache_.num_used(group), cache_.num_blocks(group));
    }
    check_events();
  }

  /// What a listener knows of the tree is what is in it.
  void check_events() {
    for (const KvEvent& event : cache_.take_events()) {
      ASSERT_EQ(event.id, ++last_event_);
      const std::pair<std::uint64_t, int> name{event.key, event.group};
      if (event.kind == KvEvent::Kind::kStored) {
        ASSERT_TRUE(told_.emplace(name, event.tier).second);
        // Without groups of full attention a block may be stored whose parent never was.
        if (event.parent_key == 0 || told_tokens_.contains(event.parent_key)) {
          Tokens tokens = event.parent_key == 0 ? Tokens{} : told_tokens_[event.parent_key];
          std::ranges::copy(event.tokens, std::back_inserter(tokens));
          PrefixKeys keys(event.realm, config_.tokens_per_block);
          keys.extend(tokens);
          ASSERT_EQ(keys.blocks().back(), event.key);
          told_tokens_[event.key] = tokens;
        }
      } else {
        const auto found = told_.find(name);
        ASSERT_NE(found, told_.end());
        ASSERT_EQ(found->second == event.tier, event.kind == KvEvent::Kind::kRemoved);
        found->second = event.tier;
        if (event.kind == KvEvent::Kind::kRemoved) {
          told_.erase(found);
        }
      }
    }
    std::map<std::pair<std::uint64_t, int>, KvTier> expected;
    for (const auto& [name, entry] : naive_.entries()) {
      PrefixKeys keys(kRealms[static_cast<std::size_t>(name.first)], config_.tokens_per_block);
      keys.extend(name.second);
      for (int group = 0; group < cache_.num_groups(); ++group) {
        const auto& slot = entry.slots[static_cast<std::size_t>(group)];
        if (slot && name.second.size() % static_cast<std::size_t>(config_.tokens_per_block) == 0) {
          expected[{keys.blocks().back(), group}] = slot->tier;
        }
      }
    }
    ASSERT_EQ(told_, expected);
  }

  KvCacheConfig config_;
  KvCache cache_;
  NaiveKvCache naive_;
  SlotSimulator memory_;
  std::mt19937 random_;
  std::array<Tokens, 3> texts_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::uint64_t last_event_ = 0;
  std::map<std::uint64_t, Tokens> told_tokens_;  ///< by key: all tokens up to the end of the block
  std::map<std::pair<std::uint64_t, int>, KvTier> told_;
};

struct Case {
  const char* name;
  std::int32_t tokens_per_block;
  std::vector<KvGroupConfig> groups;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class KvCacheProperty : public ::testing::TestWithParam<Case> {};

TEST_P(KvCacheProperty, DoesWhatTheModelDoesAndNeverMixesUpBlocks) {
  const KvCacheConfig config{GetParam().tokens_per_block, GetParam().groups, 10000};
  KvCacheStats total;
  for (unsigned seed = 0; seed < 12 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Play play(config, seed);
    play.run(300);
    total.hit_tokens += play.stats().hit_tokens;
    total.evicted_blocks += play.stats().evicted_blocks;
    total.copied_blocks += play.stats().copied_blocks;
    total.offloaded_blocks += play.stats().offloaded_blocks;
    total.onloaded_blocks += play.stats().onloaded_blocks;
  }
  EXPECT_GT(total.hit_tokens, 0);  // that the play goes where it is meant to
  EXPECT_GT(total.evicted_blocks + total.offloaded_blocks, 0);
  EXPECT_EQ(total.copied_blocks > 0, config.tokens_per_block > 1);
  EXPECT_EQ(total.onloaded_blocks > 0,
            std::ranges::any_of(config.groups, [](const KvGroupConfig& group) { return group.num_host_blocks > 0; }));
}

INSTANTIATE_TEST_SUITE_P(Shapes, KvCacheProperty,
                         ::testing::Values(Case{"full", 3, {{0, 20, 0}}}, Case{"full_tight", 4, {{0, 8, 0}}},
                                           Case{"full_blocks_of_one", 1, {{0, 40, 0}}},
                                           Case{"full_host", 3, {{0, 12, 6}}}, Case{"full_host_tight", 2, {{0, 14, 3}}},
                                           Case{"full_large_host", 2, {{0, 14, 60}}}, Case{"window", 3, {{6, 12, 0}}},
                                           Case{"window_shorter_than_a_block", 4, {{2, 10, 0}}},
                                           Case{"window_of_one", 4, {{1, 10, 0}}}, Case{"window_host", 2, {{5, 12, 8}}},
                                           Case{"full_and_window", 3, {{0, 20, 0}, {5, 10, 0}}},
                                           Case{"full_and_window_host", 3, {{0, 14, 7}, {5, 9, 5}}},
                                           Case{"full_without_window_with_host", 2, {{0, 20, 0}, {4, 9, 9}}},
                                           Case{"full_and_two_windows", 2, {{0, 24, 4}, {8, 16, 0}, {3, 12, 3}}},
                                           Case{"two_full_and_window", 2, {{0, 12, 5}, {0, 18, 0}, {4, 12, 0}}}),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace aotllm
