#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "aotllm/constraint.h"
#include "aotllm/kv_cache.h"
#include "aotllm/request.h"
#include "aotllm/sampler.h"
#include "aotllm/scheduler.h"
#include "manager/limits.h"

namespace aotllm {

using Clock = std::chrono::steady_clock;

/// Largest context chunk of a sequence whose prompt is scored: each of its tokens needs a row of logits.
inline constexpr std::int32_t kMaxScoredChunk = 64;

/// Where a sequence is in its life: queued → context → generating → finished. Preemption leads from the middle two
/// back to queued; every state may lead to finished.
enum class SequenceState : std::uint8_t { kQueued, kContext, kGenerating, kFinished };

/// One sequence of a request inside the batcher: its tokens, its blocks and how far it got.
///
/// 0 ≤ num_computed < tokens.size() < max_len between steps; the last known token is always yet to be computed. A
/// generation lacks one token, or more where a grammar has forced some.
struct Sequence {
  /// Sequence `index` of `request`, which is valid (see validate_request). `random_seed` is the request's where it has
  /// none of its own.
  Sequence(RequestId request_id, std::int32_t index, const Request& request, std::uint64_t random_seed,
           Clock::time_point now, const Limits& limits);

  /// Throws Error(kInternal) for a move that the life above does not have.
  void move_to(SequenceState next);

  /// Its lengths; what the KV cache knows of it is the batcher's to add where it waits.
  SequenceView view() const;

  /// Log-probabilities of prompt tokens are asked for, and some are still to come.
  bool scores_prompt() const;

  /// The answer is made of the prompt's hidden states.
  bool pools() const { return pooling != Pooling::kNone; }

  /// Something is needed of every prompt token, so that none may come from the cache.
  bool computes_in_full() const { return scores_prompt() || pooling == Pooling::kMean; }

  /// Something changes the logits of its tokens, or wants to see them, that a runner of such `support` cannot do.
  bool needs_logits(const SamplingSupport& support) const;

  /// Some tokens may not follow: a row that the runner draws from has a mask.
  bool needs_mask() const;

  /// Drafts of this sequence may be verified: nothing needs to know each token before the next one is computed.
  bool may_speculate() const { return state == SequenceState::kGenerating && constraint == nullptr; }

  /// The step behind one that draws its token may be begun before that token is known.
  bool can_run_ahead() const { return !needs_logits({}); }

  SequenceId id = 0;  ///< given by the manager when it is queued
  const RequestId request_id;
  const std::int32_t index;
  const std::int32_t priority;
  const std::int32_t retention;
  const std::int32_t num_logprobs;
  const std::int32_t num_prompt_logprobs;
  const bool return_logits;
  const Pooling pooling;
  const AdapterId adapter;
  const SamplingParams sampling;
  LogitsProcessors processors;
  std::unique_ptr<Constraint> constraint;  ///< null = any token may follow
  const std::uint64_t seed;

  SequenceState state = SequenceState::kQueued;
  std::vector<TokenId> tokens;  ///< prompt, then generated
  const std::int32_t num_prompt_tokens;
  std::int32_t num_computed = 0;  ///< tokens whose K and V are in `table`
  std::int32_t num_cached = -1;   ///< prompt tokens that were there at the first admission; -1 before it
  const std::int32_t max_len;     ///< prompt and generated, at most
  PrefixKeys keys;                ///< of the full blocks of `tokens`
  BlockTable table;
  std::int32_t num_scheduled = 0;              ///< tokens in the step in hand, drafts included
  std::int32_t num_scheduled_drafts = 0;       ///< of those
  std::int32_t drawn_token = -1;               ///< its place among the tokens that the runner draws in that step
  std::vector<TokenLogprobs> prompt_logprobs;  ///< collected so far, until they are sent
  bool prompt_scored = false;                  ///< they were sent
  std::int32_t count_slot = -1;                ///< where the runner counts its tokens; -1 = nowhere
  std::int32_t num_counted = 0;                ///< of `tokens`, those that are counted there
  std::vector<double> pooled;                  ///< [hidden_size], sum over the first num_pooled tokens
  std::int32_t num_pooled = 0;

  std::int64_t arrival_step = 0;  ///< when it began to wait
  bool overdue = false;
  std::int32_t num_preemptions = 0;
  std::int32_t num_draft_tokens = 0;
  std::int32_t num_accepted_tokens = 0;

  const Clock::time_point submitted;
  const Clock::time_point deadline;  ///< time_point::max() = none
  Clock::time_point admitted{};
  Clock::time_point first_token{};
};

}  // namespace aotllm
