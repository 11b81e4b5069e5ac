#include "aotllm/prefix_key.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

std::vector<std::uint64_t> keys_of(const PrefixRealm& realm, std::int32_t block_size,
                                   const std::vector<TokenId>& tokens) {
  PrefixKeys keys(realm, block_size);
  keys.extend(tokens);
  return {keys.blocks().begin(), keys.blocks().end()};
}

std::vector<TokenId> counting(int n) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(n));
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

TEST(PrefixKeys, NamesFullBlocksOnly) {
  const std::vector<std::pair<int, std::size_t>> cases = {{0, 0}, {3, 0}, {4, 1}, {7, 1}, {8, 2}};
  for (const auto& [tokens, keys] : cases) {
    EXPECT_EQ(keys_of({}, 4, counting(tokens)).size(), keys) << tokens;
  }
}

TEST(PrefixKeys, AreTheSameHoweverTheTokensCome) {
  for (const std::int32_t block_size : {1, 3, 4}) {
    const std::vector<TokenId> tokens = counting(25);
    PrefixKeys keys({7, "salt"}, block_size);
    for (std::size_t end = 0; end <= tokens.size(); end += 5) {
      keys.extend(std::span(tokens).first(end));
    }
    EXPECT_TRUE(std::ranges::equal(keys.blocks(), keys_of({7, "salt"}, block_size, tokens)));
  }
}

TEST(PrefixKeys, DependOnEveryTokenUpToTheBlocksEnd) {
  for (const std::int32_t block_size : {1, 3, 4}) {
    const std::vector<TokenId> tokens = counting(12);
    const std::vector<std::uint64_t> keys = keys_of({}, block_size, tokens);
    for (std::size_t changed = 0; changed < tokens.size(); ++changed) {
      for (const TokenId other : {99, -1}) {
        std::vector<TokenId> others = tokens;
        others[changed] = other;
        const std::vector<std::uint64_t> found = keys_of({}, block_size, others);
        for (std::size_t i = 0; i < keys.size(); ++i) {
          EXPECT_EQ(found[i] == keys[i], i < changed / static_cast<std::size_t>(block_size)) << changed << ", " << i;
        }
      }
    }
  }
}

TEST(PrefixKeys, DependOnTheRealm) {
  std::set<std::uint64_t> keys;
  const std::vector<PrefixRealm> realms = {{0, ""}, {1, ""}, {0, "a"}, {1, "a"}, {0, "b"}, {0, std::string(1, '\0')}};
  for (const PrefixRealm& realm : realms) {
    keys.insert(keys_of(realm, 4, counting(4)).front());
  }
  EXPECT_EQ(keys.size(), realms.size());
}

TEST(PrefixKeys, RefuseBlocksOfNoTokens) {
  EXPECT_THROW(PrefixKeys({}, 0), Error);
}

}  // namespace
}  // namespace aotllm
