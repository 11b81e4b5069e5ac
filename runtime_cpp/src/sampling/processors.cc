#include "sampling/processors.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "sampling/allowed_tokens.h"
#include "sampling/bad_words.h"
#include "sampling/logit_bias.h"
#include "sampling/min_tokens.h"
#include "sampling/no_repeat_ngram.h"
#include "sampling/penalties.h"

namespace aotllm {

LogitsProcessors make_processors(const SamplingParams& params, std::span<const TokenId> eos_token_ids,
                                 std::int32_t vocab_size) {
  LogitsProcessors processors;
  auto& constraints = processors.constraints;
  if (!params.allowed_token_ids.empty()) {
    constraints.push_back(std::make_unique<AllowedTokens>(params.allowed_token_ids, vocab_size));
  }
  if (!params.bad_words.empty()) {
    constraints.push_back(std::make_unique<BadWords>(params.bad_words));
  }
  if (params.no_repeat_ngram_size > 0) {
    constraints.push_back(std::make_unique<NoRepeatNgram>(params.no_repeat_ngram_size));
  }
  if (params.min_tokens > 0) {
    std::vector<TokenId> end_token_ids = params.stop_token_ids;
    std::ranges::copy_if(eos_token_ids, std::back_inserter(end_token_ids),
                         [vocab_size](TokenId token) { return token >= 0 && token < vocab_size; });
    constraints.push_back(std::make_unique<MinTokens>(params.min_tokens, std::move(end_token_ids)));
  }
  if (!params.logit_bias.empty()) {
    constraints.push_back(std::make_unique<LogitBias>(params.logit_bias));
  }
  if (params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0) {
    processors.penalties.push_back(std::make_unique<Penalties>(params));
  }
  return processors;
}

}  // namespace aotllm
