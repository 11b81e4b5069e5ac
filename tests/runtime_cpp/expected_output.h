#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "aotllm/request.h"
#include "aotllm/sampler.h"
#include "fake_model.h"
#include "sampling/processors.h"

namespace aotllm::testing {

/// All that a request gives.
struct Output {
  std::vector<TokenId> tokens;
  FinishReason reason = FinishReason::kLength;
  friend bool operator==(const Output&, const Output&) = default;
};

/// What the fake model answers to `request` (with a seed, or greedy) when it has the machine to itself.
inline Output expected_output(const Request& request, const ModelShape& shape, std::int32_t max_seq_len,
                              const std::vector<TokenId>& eos_token_ids, std::uint32_t sequence_index = 0) {
  const SamplingParams& params = request.sampling;
  std::vector<TokenId> tokens = request.prompt_token_ids;
  const auto num_prompt_tokens = static_cast<std::int32_t>(tokens.size());
  const auto contains = [](const std::vector<TokenId>& ids, TokenId id) {
    return std::set(ids.begin(), ids.end()).contains(id);
  };
  Sampler sampler(shape.vocab_size);
  std::vector<float> row(static_cast<std::size_t>(shape.vocab_size));
  Output output;
  while (true) {
    const auto last = static_cast<std::int32_t>(tokens.size()) - 1;
    const std::uint64_t hash = hash_of(shape, last, [&](int /*group*/, std::int32_t position) {
      return Slot{tokens[static_cast<std::size_t>(position)], position, request.adapter};
    });
    fake_logits(hash, tokens[0], row);
    LogitsProcessors processors = make_processors(params, eos_token_ids, shape.vocab_size);  // without a memory
    const TokenId token = sampler.sample(row, {.params = params,
                                               .processors = processors,
                                               .tokens = tokens,
                                               .num_prompt_tokens = num_prompt_tokens,
                                               .seed = static_cast<std::uint64_t>(params.seed.value_or(0)),
                                               .sequence_index = sequence_index});
    tokens.push_back(token);
    output.tokens.push_back(token);
    if (contains(params.stop_token_ids, token) || (!params.ignore_eos && contains(eos_token_ids, token))) {
      output.reason = FinishReason::kStop;
      return output;
    }
    if (output.tokens.size() == static_cast<std::size_t>(params.max_tokens) ||
        tokens.size() == static_cast<std::size_t>(max_seq_len)) {
      return output;
    }
  }
}

}  // namespace aotllm::testing
