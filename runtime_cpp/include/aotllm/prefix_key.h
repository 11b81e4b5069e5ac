#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "aotllm/model_runner.h"

namespace aotllm {

/// What keeps equal tokens apart in the prefix tree: sequences share blocks only where both fields are equal.
struct PrefixRealm {
  AdapterId adapter = 0;
  std::string salt;

  friend bool operator==(const PrefixRealm&, const PrefixRealm&) = default;
};

/// Names the full blocks of a token sequence: key i stands for the realm and all tokens of blocks 0 to i. Equal
/// sequences have equal keys; different ones have different keys but for a chance of 2^-64, so that whoever finds a
/// block by its key compares tokens.
class PrefixKeys {
 public:
  /// Throws Error(kInternal) for tokens_per_block < 1.
  PrefixKeys(PrefixRealm realm, std::int32_t tokens_per_block);

  /// Adds the keys of the full blocks of `tokens` that have none yet. `tokens` begins with the tokens of the last call.
  void extend(std::span<const TokenId> tokens);

  const PrefixRealm& realm() const { return realm_; }
  std::span<const std::uint64_t> blocks() const { return blocks_; }

 private:
  friend struct PrefixKeysPeer;  ///< tests make keys collide
  PrefixRealm realm_;
  std::int32_t tokens_per_block_;
  std::uint64_t seed_;  ///< the realm's
  std::vector<std::uint64_t> blocks_;
};

}  // namespace aotllm
