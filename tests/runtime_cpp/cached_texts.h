#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "aotllm/kv_cache.h"
#include "slot_simulator.h"

namespace aotllm::testing {

using Tokens = std::vector<TokenId>;

inline constexpr std::int32_t kBlock = 4;

/// `count` tokens from `first` on: different texts have different tokens.
inline Tokens text(TokenId first, int count) {
  Tokens tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline Tokens operator+(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// A cache with the memory that it directs. Each action checks what it can.
struct CachedTexts {
  explicit CachedTexts(std::vector<KvGroupConfig> groups, std::int32_t max_events = 0)
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

}  // namespace aotllm::testing
