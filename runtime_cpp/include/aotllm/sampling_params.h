#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "aotllm/model_runner.h"

namespace aotllm {

/// How the tokens of one request are chosen, and when it stops.
///
/// Filters apply in the order temperature, min_p, top_k, top_p, each to what the one before has left.
struct SamplingParams {
  /// Most tokens to generate; ≥ 1. The engine's context length may end the request sooner.
  std::int32_t max_tokens = 16;

  /// Divides the logits; in [0, 2]. 0 = greedy: the most likely token, the lowest id among equals.
  double temperature = 1.0;

  /// Keeps the k most likely tokens; 0 or -1 = all.
  std::int32_t top_k = 0;

  /// Keeps the smallest set of most likely tokens whose probabilities sum to at least top_p; in (0, 1], 1 = all.
  double top_p = 1.0;

  /// Keeps tokens at least min_p times as likely as the most likely one; in [0, 1], 0 = all.
  double min_p = 0.0;

  /// Makes draws reproducible, whatever else runs. Absent = a random seed, drawn once at submit.
  std::optional<std::int64_t> seed;

  /// Tokens that end the request, beside the engine's EOS tokens.
  std::vector<TokenId> stop_token_ids;

  /// EOS tokens do not end the request (stop_token_ids still do).
  bool ignore_eos = false;
};

/// Checks every range above; `vocab_size` bounds the stop tokens. Throws Error(kInvalidRequest) whose param() is the
/// name of the first field that is out of range.
void validate(const SamplingParams& params, std::int32_t vocab_size);

}  // namespace aotllm
