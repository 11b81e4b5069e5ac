#include "manager/sequence.h"

#include <algorithm>
#include <string>
#include <utility>

#include "aotllm/errors.h"
#include "sampling/processors.h"

namespace aotllm {
namespace {

/// With prefix caching switched off every request has a realm of its own, which only its own sequences share.
PrefixRealm realm_of(RequestId request_id, const Request& request, const Limits& limits) {
  return {request.adapter,
          limits.enable_prefix_caching ? "salt " + request.cache_salt : "request " + std::to_string(request_id)};
}

/// A pooled prompt ends where a token would be drawn.
std::int32_t max_len_of(const Request& request, const Limits& limits) {
  const auto num_prompt_tokens = std::ssize(request.prompt_token_ids);
  if (request.pooling != Pooling::kNone) {
    return static_cast<std::int32_t>(num_prompt_tokens) + 1;
  }
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(num_prompt_tokens + request.sampling.max_tokens, limits.max_seq_len));
}

Clock::time_point deadline_of(const Request& request, Clock::time_point now) {
  constexpr double kYear = 365.0 * 24 * 3600;  // beyond it the clock's integers are in danger
  if (request.timeout == 0.0 || request.timeout > kYear) {
    return Clock::time_point::max();
  }
  return now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(request.timeout));
}

}  // namespace

Sequence::Sequence(RequestId request_id_in, std::int32_t index_in, const Request& request, std::uint64_t random_seed,
                   Clock::time_point now, const Limits& limits)
    : request_id(request_id_in),
      index(index_in),
      priority(request.priority),
      retention(request.retention_priority),
      num_logprobs(request.logprobs),
      num_prompt_logprobs(index_in == 0 ? request.prompt_logprobs : -1),
      return_logits(request.return_logits),
      pooling(request.pooling),
      adapter(request.adapter),
      sampling(request.sampling),
      processors(make_processors(sampling, limits.eos_token_ids, limits.vocab_size)),
      constraint(request.constraint == nullptr ? nullptr : request.constraint->clone()),
      seed(sampling.seed ? static_cast<std::uint64_t>(*sampling.seed) : random_seed),
      tokens(request.prompt_token_ids),
      num_prompt_tokens(static_cast<std::int32_t>(tokens.size())),
      max_len(max_len_of(request, limits)),
      keys(realm_of(request_id_in, request, limits), limits.scheduler.tokens_per_block),
      submitted(now),
      deadline(deadline_of(request, now)) {
  keys.extend(tokens);
}

void Sequence::move_to(SequenceState next) {
  const bool running = state == SequenceState::kContext || state == SequenceState::kGenerating;
  const bool legal = (next == SequenceState::kContext && state == SequenceState::kQueued) ||
                     (next == SequenceState::kGenerating && state == SequenceState::kContext) ||
                     (next == SequenceState::kQueued && running) ||
                     (next == SequenceState::kFinished && state != SequenceState::kFinished);
  if (!legal) {
    throw Error(ErrorKind::kInternal, "sequence " + std::to_string(id) + " cannot move from state " +
                                          std::to_string(static_cast<int>(state)) + " to " +
                                          std::to_string(static_cast<int>(next)));
  }
  state = next;
}

bool Sequence::scores_prompt() const {
  return num_prompt_logprobs >= 0 && !prompt_scored;
}

bool Sequence::needs_logits(const SamplingSupport& support) const {
  const auto is_beyond = [&support](const auto& processor) {
    switch (processor->form()) {
      case ProcessorForm::kBan:
        return !support.masks;
      case ProcessorForm::kPenalties:
        return support.count_slots == 0;
      case ProcessorForm::kLogits:
        break;
    }
    return true;
  };
  return (constraint != nullptr && !support.masks) || sampling.typical_p < 1.0 || num_logprobs > support.max_logprobs ||
         return_logits || pools() || scores_prompt() || std::ranges::any_of(processors.constraints, is_beyond) ||
         std::ranges::any_of(processors.penalties, is_beyond);
}

bool Sequence::needs_mask() const {
  return constraint != nullptr || std::ranges::any_of(processors.constraints, [this](const auto& processor) {
           return !processor->idle(tokens, num_prompt_tokens);
         });
}

SequenceView Sequence::view() const {
  SequenceView view;
  view.id = id;
  view.priority = priority;
  view.num_tokens = static_cast<std::int32_t>(tokens.size());
  view.num_computed = num_computed;
  view.max_len = max_len;
  view.max_chunk = scores_prompt() ? kMaxScoredChunk : 0;
  view.is_context = state != SequenceState::kGenerating || view.remaining() > 1;
  view.num_blocks = table.num_blocks();
  view.num_preemptions = num_preemptions;
  view.overdue = overdue;
  if (!computes_in_full()) {
    view.block_keys = keys.blocks();
  }
  return view;
}

}  // namespace aotllm
