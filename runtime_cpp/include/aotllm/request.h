#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/constraint.h"
#include "aotllm/errors.h"
#include "aotllm/kv_cache.h"
#include "aotllm/model_runner.h"
#include "aotllm/sampling_params.h"

namespace aotllm {

/// Numbers requests from 1, later ones higher; never reused.
using RequestId = std::int64_t;

/// Most sequences of one request.
inline constexpr std::int32_t kMaxSequences = 128;

/// What becomes of the prompt's hidden states after the final norm.
enum class Pooling : std::uint8_t {
  kNone,  ///< nothing: the prompt is to be continued
  kLast,  ///< the last token's is the answer
  kMean,  ///< their mean is, summed in order of positions in double precision
};

/// One prompt to continue, or to make an embedding of.
struct Request {
  /// At least one token, all in [0, vocab_size), and shorter than the context length; with pooling, as long at most.
  std::vector<TokenId> prompt_token_ids;

  SamplingParams sampling;

  /// Sequences to generate from the prompt, which they share; in [1, 128]. Each has draws of its own.
  std::int32_t n = 1;

  /// A higher one is admitted first and preempted last; equals are first come, first served.
  std::int32_t priority = 0;

  /// Seconds from submit after which the request ends with what it has; 0 = never.
  double timeout = 0.0;

  /// Requests share cached prefixes only where their salts are equal.
  std::string cache_salt;

  /// How long blocks of this request stay cached, against those of others: lower ones are evicted first. In [0, 100].
  std::int32_t retention_priority = kDefaultRetention;

  /// An adapter of `GptManager::load_adapter`; 0 = the bare model.
  AdapterId adapter = 0;

  /// -1 = none; n ≥ 0: log-probability of each prompt token after the first and of the n most likely ones. The prompt
  /// is computed in full then, whatever is cached.
  std::int32_t prompt_logprobs = -1;

  /// Not kNone: the request ends with kStop when its prompt is computed, and the answer is Response::embedding in place
  /// of tokens. n is 1 then, and nothing is sampled: no log-probabilities, logits or constraint. The mean is computed
  /// in full, whatever is cached.
  Pooling pooling = Pooling::kNone;

  /// -1 = none; n ≥ 0: log-probability of each generated token and of the n most likely ones.
  std::int32_t logprobs = -1;

  /// Attach the raw logits row of each generated token to its response.
  bool return_logits = false;

  /// Start state of the grammar that the answer keeps to; the request runs on a clone. Null = none. An end token ends
  /// the request even with ignore_eos: a grammar has nothing after it.
  std::shared_ptr<const Constraint> constraint;
};

/// Why a request ended.
enum class FinishReason : std::uint8_t {
  kStop,       ///< an EOS or stop token, the last of the generated ones; or a grammar after which nothing may follow;
               ///< or the pooled prompt's end
  kLength,     ///< max_tokens, or the context length, was reached
  kCancelled,  ///< by its owner or by shutdown
  kTimeout,    ///< Request::timeout has passed
  kError,      ///< see Response::error_kind
};

/// "stop", "length", "cancelled", "timeout" or "error".
const char* finish_reason_name(FinishReason reason) noexcept;

/// Natural logarithms of softmax(raw logits): before temperature and filters.
struct TokenLogprobs {
  TokenId token_id = 0;
  double logprob = 0.0;
  /// The n most likely tokens, most likely first, lower id first among equals.
  std::vector<std::pair<TokenId, double>> top;
};

/// When things happened to a sequence: seconds from submit.
struct SequenceTimings {
  double queue_seconds = 0.0;        ///< until it was first admitted
  double first_token_seconds = 0.0;  ///< until its first token; 0 where there was none
  double total_seconds = 0.0;        ///< until its end
};

/// News of one sequence of a request after a step. The last one of a sequence has finish_reason set.
struct Response {
  RequestId request_id = 0;
  std::int32_t sequence_index = 0;         ///< in [0, Request::n)
  std::vector<TokenId> token_ids;          ///< generated since the response before
  std::vector<TokenLogprobs> logprobs;     ///< one per token where asked for
  std::vector<std::vector<float>> logits;  ///< one raw row [vocab_size] per token where asked for
  /// One per prompt token after the first, where asked for; in the first response of sequence 0.
  std::vector<TokenLogprobs> prompt_logprobs;
  std::vector<float> embedding;  ///< [hidden_size] with pooling, in the last response if the prompt came to its end
  std::optional<FinishReason> finish_reason;
  std::optional<TokenId> stop_token_id;  ///< the EOS or stop token that ended the sequence
  std::optional<ErrorKind> error_kind;   ///< set with finish_reason kError only
  std::string error_message;
  std::int32_t num_prompt_tokens = 0;
  std::int32_t num_cached_tokens = 0;    ///< prompt tokens whose K and V were there already
  std::int32_t num_preemptions = 0;      ///< so far
  std::int32_t num_draft_tokens = 0;     ///< verified so far
  std::int32_t num_accepted_tokens = 0;  ///< of those, accepted
  SequenceTimings timings;               ///< in the last response
};

}  // namespace aotllm
