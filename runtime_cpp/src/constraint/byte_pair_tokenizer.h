#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "aotllm/model_runner.h"

namespace aotllm {

/// Byte-pair encoding by the order of the vocabulary: of all neighbours that together are a token, those with the
/// lowest id are joined first.
///
/// BPE vocabularies list tokens in the order of their merges, so this is what the model's own tokenizer does to a piece
/// of text, but for its splitting into words beforehand, which it does without: trained vocabularies have next to no
/// tokens that reach across. The tokens spell the text in any case.
class BytePairTokenizer {
 public:
  /// `tokens` by id; empty ones take no part. Of equal ones the last counts: SentencePiece lists its byte tokens first.
  explicit BytePairTokenizer(std::span<const std::string> tokens);

  /// Tokens whose concatenation is `text`. Bytes that no token has are left out. O(n log n).
  std::vector<TokenId> tokenize(std::string_view text) const;

 private:
  static constexpr TokenId kNone = -1;

  TokenId find(std::string_view bytes) const;

  std::vector<std::string> storage_;  ///< what the keys of ids_ point to
  std::unordered_map<std::string_view, TokenId> ids_;
};

}  // namespace aotllm
