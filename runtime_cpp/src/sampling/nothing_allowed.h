#pragma once

#include "aotllm/errors.h"

namespace aotllm {

/// All logits are -inf: the fault of the request if they are `constrained`.
inline Error nothing_allowed(bool constrained) {
  if (constrained) {
    return {ErrorKind::kInvalidRequest,
            "no token is allowed: the request's constraints (allowed_token_ids, bad_words, no_repeat_ngram_size, "
            "min_tokens, a grammar) rule out all of them together; loosen one"};
  }
  return {ErrorKind::kInternal, "no token is allowed: all logits are -inf"};
}

}  // namespace aotllm
