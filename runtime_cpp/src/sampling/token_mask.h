#pragma once

#include <cstdint>
#include <span>

namespace aotllm {

/// Forbids the tokens whose bit (t % 32 of word t / 32) is 0. `mask` has ⌈logits / 32⌉ words, else Error(kInternal);
/// bits past the last token have no meaning.
void apply_token_mask(std::span<float> logits, std::span<const std::uint32_t> mask);

}  // namespace aotllm
