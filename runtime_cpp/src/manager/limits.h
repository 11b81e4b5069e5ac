#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "aotllm/gpt_manager.h"
#include "aotllm/scheduler.h"

namespace aotllm {

/// What a manager works within: its config with every 0 resolved against the engine's shape.
struct Limits {
  SchedulerConfig scheduler;
  KvMemory kv_memory;
  std::int32_t max_kv_events = 0;
  bool enable_prefix_caching = true;
  std::int32_t num_speculative_tokens = 0;
  std::int32_t vocab_size = 0;
  std::int32_t hidden_size = 0;         ///< 0 = no embeddings
  std::int32_t max_seq_len = 0;         ///< context length: the engine's, or what the KV memory holds if less
  std::int32_t engine_max_seq_len = 0;  ///< context length of the engine
  std::int32_t max_queue_size = 0;
  std::int64_t max_queued_tokens = 0;  ///< 0 = no limit
  std::vector<TokenId> eos_token_ids;
};

/// Resolves and checks `config`; `free` as the runner says. Throws Error(kInvalidRequest) with the field's
/// name.
Limits resolve_limits(const ModelShape& shape, const ManagerConfig& config, const FreeMemory& free);

/// Checks all fields of `request`. Throws Error(kInvalidRequest) with the field's name, or kContextTooLong.
void validate_request(const Request& request, const Limits& limits);

}  // namespace aotllm
