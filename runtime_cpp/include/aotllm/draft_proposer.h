#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"
#include "aotllm/prefix_key.h"
#include "aotllm/scheduler.h"

namespace aotllm {

/// Guesses how generations go on, for speculative decoding: the guesses are verified in one step of the engine, and a
/// wrong one costs its computation only. What is generated does not depend on the proposer at all.
///
/// Used by the manager's loop, between steps.
class DraftProposer {
 public:
  struct Query {
    SequenceId id = 0;
    std::span<const TokenId> tokens;     ///< prompt and generated so far
    std::int32_t max_drafts = 0;         ///< ≥ 1
    const PrefixRealm* realm = nullptr;  ///< what the proposer keeps of the tokens is for sequences of this one only
  };

  virtual ~DraftProposer() = default;

  /// Fills drafts[i] with at most queries[i].max_drafts tokens that may follow queries[i].tokens; fewer or none where
  /// it has no idea. Throws where it fails; the step then goes on without drafts.
  virtual void propose(std::span<const Query> queries, std::vector<std::vector<TokenId>>& drafts) = 0;

  /// The sequence has ended or was preempted.
  virtual void forget(SequenceId id) = 0;
};

/// Prompt lookup: what followed the latest earlier occurrence of the last n tokens, for the largest n in
/// [ngram_min, ngram_max] that occurs (Saxena, "Prompt Lookup Decoding", 2023). Throws Error(kInvalidRequest) unless
/// 1 ≤ ngram_min ≤ ngram_max.
std::unique_ptr<DraftProposer> make_ngram_proposer(std::int32_t ngram_min, std::int32_t ngram_max);

/// A smaller engine with the same tokens: its most likely continuation. It keeps `num_blocks` KV blocks of its own (in
/// each group); sequences that find no room in them get no drafts.
std::unique_ptr<DraftProposer> make_engine_proposer(std::unique_ptr<ModelRunner> runner, std::int32_t num_blocks);

}  // namespace aotllm
