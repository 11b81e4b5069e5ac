#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "aotllm/model_runner.h"

namespace aotllm {

/// How often each token occurs in a text of which versions come one after the other: mostly the text before and a token
/// more, but any other too.
class TokenCounts {
 public:
  struct Entry {
    TokenId token = 0;
    std::int32_t in_prompt = 0;
    std::int32_t in_output = 0;
  };

  /// Counts `tokens`, of which the first `num_prompt_tokens` are the prompt. Costs one comparison with the text before,
  /// and one look-up for each token that has come or gone.
  void follow(std::span<const TokenId> tokens, std::int32_t num_prompt_tokens);

  /// One for each token of the text; those of tokens that are gone again may be there too, with counts of 0.
  std::span<const Entry> entries() const { return entries_; }

 private:
  void count(std::size_t position, std::int32_t change);

  std::vector<TokenId> text_;  ///< what entries_ count
  std::size_t num_prompt_tokens_ = 0;
  std::vector<Entry> entries_;
  std::unordered_map<TokenId, std::size_t> index_;  ///< of a token's entry
};

}  // namespace aotllm
