#pragma once

#include <cstdint>
#include <span>

#include "aotllm/sampler.h"

namespace aotllm {

/// The processors that `params` ask for; none of those that are off. `params` are valid (see validate);
/// EOS tokens that the model cannot generate are passed over.
LogitsProcessors make_processors(const SamplingParams& params, std::span<const TokenId> eos_token_ids,
                                 std::int32_t vocab_size);

}  // namespace aotllm
