#include "manager/limits.h"

#include <algorithm>
#include <limits>
#include <string>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

[[noreturn]] void refuse(const char* param, const std::string& message) {
  throw Error(ErrorKind::kInvalidRequest, message, param);
}

/// `value` within [1, engine's]; 0 = the engine's.
std::int32_t within_engine(const char* param, std::int32_t value, std::int32_t engine) {
  if (value < 0 || value > engine) {
    refuse(param, std::string(param) + " is " + std::to_string(value) + "; the engine was built for at most " +
                      std::to_string(engine) + " (0 takes that). Rebuild it for more");
  }
  return value == 0 ? engine : value;
}

/// Blocks for max_batch_size sequences of full length within a quarter of the free memory. Where that holds not even
/// one such sequence, as much of one as three quarters of the memory hold.
std::int32_t default_num_kv_blocks(const ModelShape& shape, std::int32_t max_batch_size,
                                   std::optional<std::int64_t> free_bytes) {
  const std::int64_t one = (shape.max_seq_len + shape.tokens_per_block - 1) / shape.tokens_per_block;
  const std::int64_t wanted = std::min<std::int64_t>(one * max_batch_size, std::numeric_limits<std::int32_t>::max());
  if (shape.kv_bytes_per_block <= 0) {
    return static_cast<std::int32_t>(wanted);
  }
  if (!free_bytes) {
    return static_cast<std::int32_t>(one);
  }
  const std::int64_t quarter = *free_bytes / 4 / shape.kv_bytes_per_block;
  const std::int64_t blocks =
      quarter >= one ? std::min(wanted, quarter) : std::min(one, *free_bytes / 4 * 3 / shape.kv_bytes_per_block);
  if (blocks < 1) {
    refuse("num_kv_blocks", "no memory for the KV cache: " + std::to_string(*free_bytes) +
                                " bytes are free, and one block of " + std::to_string(shape.tokens_per_block) +
                                " tokens takes " + std::to_string(shape.kv_bytes_per_block) +
                                ". Free some memory or take a smaller engine");
  }
  return static_cast<std::int32_t>(blocks);
}

}  // namespace

Limits resolve_limits(const ModelShape& shape, const ManagerConfig& config, std::optional<std::int64_t> free_bytes) {
  Limits limits;
  SchedulerConfig& scheduler = limits.scheduler;
  scheduler.max_batch_size = within_engine("max_batch_size", config.max_batch_size, shape.max_batch_size);
  scheduler.max_num_tokens = within_engine("max_num_tokens", config.max_num_tokens, shape.max_num_tokens);
  scheduler.tokens_per_block = shape.tokens_per_block;
  if (config.max_chunk_tokens < 0) {
    refuse("max_chunk_tokens", "max_chunk_tokens is " + std::to_string(config.max_chunk_tokens) +
                                   "; it must be at least 1, or 0 for no limit below max_num_tokens");
  }
  scheduler.max_chunk_tokens = config.max_chunk_tokens == 0
                                   ? scheduler.max_num_tokens
                                   : std::min(config.max_chunk_tokens, scheduler.max_num_tokens);
  if (config.max_queue_size < 0) {
    refuse("max_queue_size", "max_queue_size is " + std::to_string(config.max_queue_size) + "; it must be at least 0");
  }
  if (config.num_kv_blocks < 0) {
    refuse("num_kv_blocks", "num_kv_blocks is " + std::to_string(config.num_kv_blocks) +
                                "; it must be at least 1, or 0 to size the KV cache by the free memory");
  }
  limits.vocab_size = shape.vocab_size;
  limits.max_queue_size = config.max_queue_size;
  limits.eos_token_ids = config.eos_token_ids;
  limits.num_kv_blocks = config.num_kv_blocks == 0 ? default_num_kv_blocks(shape, scheduler.max_batch_size, free_bytes)
                                                   : config.num_kv_blocks;
  limits.engine_max_seq_len = shape.max_seq_len;
  limits.max_seq_len = static_cast<std::int32_t>(
      std::min<std::int64_t>(shape.max_seq_len, std::int64_t{limits.num_kv_blocks} * shape.tokens_per_block));
  return limits;
}

void validate_request(const Request& request, const Limits& limits) {
  if (request.prompt_token_ids.empty()) {
    refuse("prompt_token_ids", "prompt_token_ids is empty; at least one token is needed");
  }
  for (const TokenId token : request.prompt_token_ids) {
    if (token < 0 || token >= limits.vocab_size) {
      refuse("prompt_token_ids", "prompt_token_ids holds " + std::to_string(token) + "; token ids are in [0, " +
                                     std::to_string(limits.vocab_size) + ")");
    }
  }
  validate(request.sampling, limits.vocab_size);
  if (request.logprobs < -1 || request.logprobs > limits.vocab_size) {
    refuse("logprobs", "logprobs is " + std::to_string(request.logprobs) + "; it must be in [0, " +
                           std::to_string(limits.vocab_size) + "], or -1 for none");
  }
  const std::size_t prompt_len = request.prompt_token_ids.size();
  if (prompt_len >= static_cast<std::size_t>(limits.max_seq_len)) {
    std::string message = "the maximum context length is " + std::to_string(limits.max_seq_len) +
                          " tokens, but the prompt has " + std::to_string(prompt_len) +
                          " and at least one is to be generated. Shorten the prompt";
    if (limits.max_seq_len < limits.engine_max_seq_len) {
      message += ", or raise num_kv_blocks: the engine can do " + std::to_string(limits.engine_max_seq_len) +
                 " tokens, but the KV cache of " + std::to_string(limits.num_kv_blocks) + " blocks cannot";
    }
    throw Error(ErrorKind::kContextTooLong, message, "prompt_token_ids");
  }
}

}  // namespace aotllm
