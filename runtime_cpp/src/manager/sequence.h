#pragma once

#include <cstdint>
#include <vector>

#include "aotllm/kv_cache.h"
#include "aotllm/request.h"
#include "aotllm/sampler.h"
#include "aotllm/scheduler.h"
#include "manager/limits.h"

namespace aotllm {

/// Where a sequence is in its life: queued → context → generating → finished. Preemption leads from the middle two
/// back to queued; every state may lead to finished.
enum class SequenceState : std::uint8_t { kQueued, kContext, kGenerating, kFinished };

/// A request inside the batcher: its tokens, its blocks and how far it got.
///
/// 0 ≤ num_computed < tokens.size() < max_len between steps; the last known token is always yet to be computed.
struct Sequence {
  /// `request` is valid (see validate_request) and moved from.
  Sequence(RequestId request_id, Request&& request, std::uint64_t random_seed, const Limits& limits);

  /// Throws Error(kInternal) for a move that the life above does not have.
  void move_to(SequenceState next);

  SequenceView view() const;

  RequestId id;
  std::int32_t priority;
  std::int32_t num_logprobs;
  bool return_logits;
  SamplingParams sampling;
  LogitsProcessors processors;
  std::uint64_t seed;  ///< the request's, or a random one

  SequenceState state = SequenceState::kQueued;
  std::vector<TokenId> tokens;  ///< prompt, then generated
  std::int32_t num_prompt_tokens;
  std::int32_t num_computed = 0;  ///< tokens whose K and V are in `table`
  std::int32_t num_cached = -1;   ///< prompt tokens that were there at the first admission; -1 before it
  std::int32_t max_len;           ///< prompt and generated, at most
  BlockTable table;
};

}  // namespace aotllm
