#include "aotllm/sampling_params.h"

#include <cmath>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

template <typename T>
void require(bool in_range, const char* param, T got, const std::string& allowed) {
  if (in_range) {
    return;
  }
  std::ostringstream message;
  message << param << " is " << got << "; it must be " << allowed;
  throw Error(ErrorKind::kInvalidRequest, message.str(), param);
}

void require_token(const char* param, TokenId token, std::int32_t vocab_size) {
  require(token >= 0 && token < vocab_size, param, token, "a token id in [0, " + std::to_string(vocab_size) + ")");
}

void require_tokens(const char* param, std::span<const TokenId> tokens, std::int32_t vocab_size) {
  for (const TokenId token : tokens) {
    require_token(param, token, vocab_size);
  }
}

/// What is allowed and how much it is liked. Written so that NaN fails.
void validate_processors(const SamplingParams& params, std::int32_t vocab_size) {
  require(params.repetition_penalty > 0.0 && std::isfinite(params.repetition_penalty), "repetition_penalty",
          params.repetition_penalty, "finite and above 0; 1 is off");
  require(std::abs(params.presence_penalty) <= 2.0, "presence_penalty", params.presence_penalty,
          "in [-2, 2]; 0 is off");
  require(std::abs(params.frequency_penalty) <= 2.0, "frequency_penalty", params.frequency_penalty,
          "in [-2, 2]; 0 is off");
  require(params.no_repeat_ngram_size >= 0, "no_repeat_ngram_size", params.no_repeat_ngram_size,
          "at least 1, or 0 for no limit");
  for (const auto& [token, bias] : params.logit_bias) {
    require_token("logit_bias", token, vocab_size);
    require(std::abs(bias) <= 100.0, "logit_bias", bias, "in [-100, 100] for each token");
  }
  require_tokens("allowed_token_ids", params.allowed_token_ids, vocab_size);
  for (const std::vector<TokenId>& sequence : params.bad_words) {
    require(!sequence.empty(), "bad_words", "an empty sequence", "one or more tokens each");
    require_tokens("bad_words", sequence, vocab_size);
  }
  require(params.min_tokens >= 0 && params.min_tokens <= params.max_tokens, "min_tokens", params.min_tokens,
          "in [0, " + std::to_string(params.max_tokens) + "], the latter being max_tokens");
}

}  // namespace

void validate(const SamplingParams& params, std::int32_t vocab_size) {
  // Written so that NaN fails.
  require(params.max_tokens >= 1, "max_tokens", params.max_tokens, "at least 1");
  require(params.temperature >= 0.0 && params.temperature <= 100.0, "temperature", params.temperature,
          "in [0, 100]; 0 is greedy");
  require(params.top_k >= -1, "top_k", params.top_k, "at least 1, or 0 or -1 for no limit");
  require(params.top_p > 0.0 && params.top_p <= 1.0, "top_p", params.top_p, "in (0, 1]; 1 keeps all tokens");
  require(params.min_p >= 0.0 && params.min_p <= 1.0, "min_p", params.min_p, "in [0, 1]; 0 keeps all tokens");
  require(params.typical_p > 0.0 && params.typical_p <= 1.0, "typical_p", params.typical_p,
          "in (0, 1]; 1 keeps all tokens");
  require_tokens("stop_token_ids", params.stop_token_ids, vocab_size);
  validate_processors(params, vocab_size);
}

}  // namespace aotllm
