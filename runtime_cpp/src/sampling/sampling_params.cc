#include "aotllm/sampling_params.h"

#include <cmath>
#include <sstream>
#include <string>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

template <typename T>
void require(bool in_range, const char* param, T got, const std::string& allowed) {
  if (in_range) {
    return;
  }
  std::ostringstream message;
  message << param << " is " << got << "; it must be " << allowed;
  throw Error(ErrorKind::kInvalidRequest, message.str(), param);
}

}  // namespace

void validate(const SamplingParams& params, std::int32_t vocab_size) {
  // Written so that NaN fails.
  require(params.max_tokens >= 1, "max_tokens", params.max_tokens, "at least 1");
  require(params.temperature >= 0.0 && params.temperature <= 2.0, "temperature", params.temperature,
          "in [0, 2]; 0 is greedy");
  require(params.top_k >= -1, "top_k", params.top_k, "at least 1, or 0 or -1 for no limit");
  require(params.top_p > 0.0 && params.top_p <= 1.0, "top_p", params.top_p, "in (0, 1]; 1 keeps all tokens");
  require(params.min_p >= 0.0 && params.min_p <= 1.0, "min_p", params.min_p, "in [0, 1]; 0 keeps all tokens");
  for (const TokenId token : params.stop_token_ids) {
    require(token >= 0 && token < vocab_size, "stop_token_ids", token,
            "a token id in [0, " + std::to_string(vocab_size) + ")");
  }
}

}  // namespace aotllm
