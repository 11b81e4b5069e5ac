#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <vector>

#include "aotllm/sampler.h"
#include "sampling/processors.h"

namespace aotllm::testing {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

/// `logits` after all of `processors`.
inline std::vector<float> apply(LogitsProcessors& processors, std::vector<float> logits,
                                const std::vector<TokenId>& tokens, std::int32_t num_prompt_tokens) {
  for (const auto* stage : {&processors.constraints, &processors.penalties}) {
    for (const auto& processor : *stage) {
      processor->apply(logits, tokens, num_prompt_tokens);
    }
  }
  return logits;
}

/// `logits` after the processors of `params`, made for this one call.
inline std::vector<float> processed(const SamplingParams& params, const std::vector<float>& logits,
                                    const std::vector<TokenId>& tokens, std::int32_t num_prompt_tokens,
                                    std::span<const TokenId> eos_token_ids = {}) {
  LogitsProcessors processors = make_processors(params, eos_token_ids, static_cast<std::int32_t>(logits.size()));
  return apply(processors, logits, tokens, num_prompt_tokens);
}

/// The same tokens as a mask says it, for runners that sample.
inline std::set<TokenId> masked(const SamplingParams& params, std::int32_t vocab_size,
                                const std::vector<TokenId>& tokens, std::int32_t num_prompt_tokens,
                                std::span<const TokenId> eos_token_ids) {
  LogitsProcessors processors = make_processors(params, eos_token_ids, vocab_size);
  std::vector<std::uint32_t> mask((static_cast<std::size_t>(vocab_size) + 31) / 32, ~0U);
  for (const auto& processor : processors.constraints) {
    EXPECT_EQ(processor->form(), ProcessorForm::kBan);
    const std::vector<std::uint32_t> before = mask;
    processor->forbid(mask, tokens, num_prompt_tokens);
    EXPECT_TRUE(mask == before || !processor->idle(tokens, num_prompt_tokens)) << "it is idle and forbids something";
  }
  std::set<TokenId> ids;
  for (TokenId token = 0; token < vocab_size; ++token) {
    if ((mask[static_cast<std::size_t>(token) / 32] >> (token % 32) & 1U) == 0) {
      ids.insert(token);
    }
  }
  return ids;
}

/// The tokens of a vocabulary that the processors of `params` forbid. Expects that the others' logits stay.
inline std::set<TokenId> banned(const SamplingParams& params, std::int32_t vocab_size,
                                const std::vector<TokenId>& tokens, std::int32_t num_prompt_tokens,
                                std::span<const TokenId> eos_token_ids = {}) {
  const std::vector<float> logits(static_cast<std::size_t>(vocab_size), 0.5F);
  const std::vector<float> after = processed(params, logits, tokens, num_prompt_tokens, eos_token_ids);
  std::set<TokenId> ids;
  for (std::size_t i = 0; i < after.size(); ++i) {
    if (after[i] == -kInf) {
      ids.insert(static_cast<TokenId>(i));
    } else {
      EXPECT_EQ(after[i], 0.5F) << "token " << i;
    }
  }
  EXPECT_EQ(masked(params, vocab_size, tokens, num_prompt_tokens, eos_token_ids), ids);
  return ids;
}

}  // namespace aotllm::testing
