#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "aotllm/model_runner.h"
#include "aotllm/sampling_params.h"

namespace aotllm {

/// Numbers requests in order of submission, from 1; never reused.
using RequestId = std::int64_t;

/// One prompt to continue.
struct Request {
  /// At least one token, all in [0, vocab_size), and shorter than the context length.
  std::vector<TokenId> prompt_token_ids;

  SamplingParams sampling;

  /// A higher one is admitted first and preempted last; equals are first come, first served.
  std::int32_t priority = 0;

  /// -1 = none; n ≥ 0: log-probability of each generated token and of the n most likely ones.
  std::int32_t logprobs = -1;

  /// Attach the raw logits row of each generated token to its response.
  bool return_logits = false;
};

/// Why a request ended.
enum class FinishReason : std::uint8_t {
  kStop,       ///< an EOS or stop token, which is the last of the generated tokens
  kLength,     ///< max_tokens, or the context length, was reached
  kCancelled,  ///< by its owner or by shutdown
  kError,      ///< see Response::error_kind
};

/// "stop", "length", "cancelled" or "error".
const char* finish_reason_name(FinishReason reason) noexcept;

/// Natural logarithms of softmax(raw logits): before temperature and filters.
struct TokenLogprobs {
  TokenId token_id = 0;
  double logprob = 0.0;
  /// The n most likely tokens, most likely first, lower id first among equals.
  std::vector<std::pair<TokenId, double>> top;
};

/// News of one request after a step. The last one of a request has finish_reason set.
struct Response {
  RequestId request_id = 0;
  std::vector<TokenId> token_ids;          ///< generated since the response before
  std::vector<TokenLogprobs> logprobs;     ///< one per token where asked for
  std::vector<std::vector<float>> logits;  ///< one raw row [vocab_size] per token where asked for
  std::optional<FinishReason> finish_reason;
  std::optional<TokenId> stop_token_id;  ///< the EOS or stop token that ended the request
  std::optional<ErrorKind> error_kind;   ///< set with finish_reason kError only
  std::string error_message;
  std::int32_t num_prompt_tokens = 0;
  std::int32_t num_cached_tokens = 0;  ///< prompt tokens whose K and V were there already
};

}  // namespace aotllm
