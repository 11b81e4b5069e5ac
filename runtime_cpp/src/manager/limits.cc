#include "manager/limits.h"

#include <algorithm>
#include <limits>
#include <string>

#include "aotllm/errors.h"
#include "manager/kv_memory.h"
#include "support/strings.h"

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

void require_at_least(const char* param, double value, double least) {
  if (!(value >= least)) {
    refuse(param, cat(param, " is ", value, "; it must be at least ", least));
  }
}

void validate_pooling(const Request& request, const Limits& limits) {
  if (request.pooling == Pooling::kNone) {
    return;
  }
  if (limits.hidden_size == 0) {
    refuse("pooling", "this target gives no hidden states, and without them there is no embedding");
  }
  if (request.n != 1) {
    refuse("n", cat("n is ", request.n, "; a prompt has 1 embedding"));
  }
  const char* unused = request.logprobs >= 0          ? "logprobs"
                       : request.prompt_logprobs >= 0 ? "prompt_logprobs"
                       : request.return_logits        ? "return_logits"
                       : request.constraint           ? "constraint"
                                                      : nullptr;
  if (unused != nullptr) {
    refuse(unused, cat(unused, " is for generated text; an embedding has none. Leave it out"));
  }
}

/// Throws Error(kContextTooLong) where the prompt leaves no room for a token; with pooling it needs none.
void validate_length(const Request& request, const Limits& limits) {
  const auto prompt_len = std::ssize(request.prompt_token_ids);
  const bool pools = request.pooling != Pooling::kNone;
  if (prompt_len + (pools ? 0 : 1) <= limits.max_seq_len) {
    return;
  }
  std::string message = cat("the maximum context length is ", limits.max_seq_len, " tokens, but the prompt has ",
                            prompt_len, pools ? "" : " and at least one is to be generated", ". Shorten the prompt");
  if (limits.max_seq_len < limits.engine_max_seq_len) {
    message += cat(", or raise the KV memory: the engine can do ", limits.engine_max_seq_len,
                   " tokens, but the KV cache of ", limits.kv_memory.groups.front().device_blocks, " blocks cannot");
  }
  throw Error(ErrorKind::kContextTooLong, message, "prompt_token_ids");
}

}  // namespace

Limits resolve_limits(const ModelShape& shape, const ManagerConfig& config, const FreeMemory& free) {
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
  scheduler.windows.clear();
  for (const KvGroupShape& group : shape.kv_groups) {
    scheduler.windows.push_back(group.window);
  }
  scheduler.capacity_policy = config.capacity_policy;
  scheduler.queue_policy = config.queue_policy;
  scheduler.max_wait_steps = config.max_wait_steps;
  require_at_least("max_wait_steps", static_cast<double>(config.max_wait_steps), 1);
  require_at_least("max_queue_size", config.max_queue_size, 0);
  require_at_least("max_queued_tokens", static_cast<double>(config.max_queued_tokens), 0);
  require_at_least("max_kv_events", config.max_kv_events, 0);
  require_at_least("num_speculative_tokens", config.num_speculative_tokens, 0);
  require_at_least("stuck_step_seconds", config.stuck_step_seconds, 0);
  limits.max_queue_size = config.max_queue_size;
  limits.max_queued_tokens = config.max_queued_tokens;
  limits.max_kv_events = config.max_kv_events;
  limits.enable_prefix_caching = config.enable_prefix_caching;
  limits.num_speculative_tokens = config.num_speculative_tokens;
  limits.vocab_size = shape.vocab_size;
  limits.hidden_size = shape.hidden_size;
  limits.eos_token_ids = config.eos_token_ids;
  std::erase_if(limits.eos_token_ids, [&](TokenId token) {  // never said, and no place in the logits to ban it at
    return token < 0 || token >= shape.vocab_size;
  });
  limits.kv_memory = KvMemoryPlanner(shape, scheduler).plan(config, scheduler.max_batch_size, free);
  limits.engine_max_seq_len = shape.max_seq_len;
  limits.max_seq_len = limits.kv_memory.max_seq_len;
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
  if (request.prompt_logprobs < -1 || request.prompt_logprobs > limits.vocab_size) {
    refuse("prompt_logprobs", cat("prompt_logprobs is ", request.prompt_logprobs, "; it must be in [0, ",
                                  limits.vocab_size, "], or -1 for none"));
  }
  if (request.n < 1 || request.n > kMaxSequences) {
    refuse("n", cat("n is ", request.n, "; it must be in [1, ", kMaxSequences, "]"));
  }
  const std::int64_t most = std::int64_t{limits.max_queue_size} + limits.scheduler.max_batch_size;
  if (request.n > most) {  // waiting would not help
    refuse("n", cat("n is ", request.n, ", but no more than ", most,
                    " sequences can wait and run at a time (max_queue_size ", limits.max_queue_size,
                    ", max_batch_size ", limits.scheduler.max_batch_size, "). Ask for fewer, or raise max_queue_size"));
  }
  if (!(request.timeout >= 0.0)) {
    refuse("timeout", cat("timeout is ", request.timeout, " seconds; it must be at least 0, 0 for none"));
  }
  if (request.retention_priority < kMinRetention || request.retention_priority > kMaxRetention) {
    refuse("retention_priority", cat("retention_priority is ", request.retention_priority, "; it must be in [",
                                     kMinRetention, ", ", kMaxRetention, "]"));
  }
  if (request.adapter < 0) {
    refuse("adapter", cat("adapter is ", request.adapter, "; it must be one of load_adapter, or 0 for none"));
  }
  validate_pooling(request, limits);
  validate_length(request, limits);
}

}  // namespace aotllm
