#include "manager/sequence.h"

#include <algorithm>
#include <string>
#include <utility>

#include "aotllm/errors.h"

namespace aotllm {

Sequence::Sequence(RequestId request_id, Request&& request, std::uint64_t random_seed, const Limits& limits)
    : id(request_id),
      priority(request.priority),
      num_logprobs(request.logprobs),
      return_logits(request.return_logits),
      sampling(std::move(request.sampling)),
      seed(sampling.seed ? static_cast<std::uint64_t>(*sampling.seed) : random_seed),
      tokens(std::move(request.prompt_token_ids)),
      num_prompt_tokens(static_cast<std::int32_t>(tokens.size())),
      max_len(static_cast<std::int32_t>(
          std::min<std::int64_t>(std::int64_t{num_prompt_tokens} + sampling.max_tokens, limits.max_seq_len))) {}

void Sequence::move_to(SequenceState next) {
  const bool running = state == SequenceState::kContext || state == SequenceState::kGenerating;
  const bool legal = (next == SequenceState::kContext && state == SequenceState::kQueued) ||
                     (next == SequenceState::kGenerating && state == SequenceState::kContext) ||
                     (next == SequenceState::kQueued && running) ||
                     (next == SequenceState::kFinished && state != SequenceState::kFinished);
  if (!legal) {
    throw Error(ErrorKind::kInternal, "request " + std::to_string(id) + " cannot move from state " +
                                          std::to_string(static_cast<int>(state)) + " to " +
                                          std::to_string(static_cast<int>(next)));
  }
  state = next;
}

SequenceView Sequence::view() const {
  return {.id = id,
          .priority = priority,
          .num_tokens = static_cast<std::int32_t>(tokens.size()),
          .num_computed = num_computed,
          .max_len = max_len,
          .num_blocks = table.size()};
}

}  // namespace aotllm
