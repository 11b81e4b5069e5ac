#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aotllm/adapter.h"
#include "aotllm/draft_proposer.h"
#include "aotllm/kv_event.h"
#include "aotllm/model_runner.h"
#include "aotllm/request.h"
#include "aotllm/scheduler.h"
#include "aotllm/stats.h"

namespace aotllm {

/// Limits of a manager. 0 takes what the engine was built for, where it says so.
struct ManagerConfig {
  /// Threads of the runner; 0 = all that this process may use. The manager's own threads are extra and mostly asleep.
  std::int32_t num_threads = 0;

  /// KV memory of the device, in one of four ways: blocks, tokens, bytes, or a fraction of the free memory, in (0, 1].
  /// All 0 = enough for max_batch_size sequences of the engine's max_seq_len, at most a quarter of the free memory
  /// (nine tenths of a GPU's), though at least one such sequence where memory has room for it. Less than a sequence of
  /// max_seq_len needs shortens the context length.
  std::int32_t num_kv_blocks = 0;
  std::int64_t kv_cache_tokens = 0;
  std::int64_t kv_cache_bytes = 0;
  double kv_cache_fraction = 0.0;

  /// Bytes of host memory that evicted blocks move to; 0 = they are lost.
  std::int64_t kv_host_bytes = 0;

  /// Most sequences in a step; 0 = the engine's, which is the most allowed.
  std::int32_t max_batch_size = 0;

  /// Most tokens in a step over all sequences; 0 = the engine's, which is the most allowed.
  std::int32_t max_num_tokens = 0;

  /// Largest context chunk of one sequence in one step; 0 = no limit below max_num_tokens.
  std::int32_t max_chunk_tokens = 0;

  CapacityPolicy capacity_policy = CapacityPolicy::kMaxUtilization;
  QueuePolicy queue_policy = QueuePolicy::kPriority;

  /// A sequence that has waited for this many steps goes ahead of all that have not; ≥ 1.
  std::int64_t max_wait_steps = 2000;

  /// Most sequences that wait although the batch or the KV memory is full; one more is Overloaded. ≥ 0.
  std::int32_t max_queue_size = 1024;

  /// Most prompt tokens that wait, over all sequences; 0 = no limit.
  std::int64_t max_queued_tokens = 0;

  /// Requests take the K and V of a common prefix from each other. Off, sequences of one request still do.
  bool enable_prefix_caching = true;

  /// Events of the prefix tree kept for `kv_events`; 0 = none.
  std::int32_t max_kv_events = 0;

  /// Draft tokens for each generation and step, where there is a proposer; ≥ 0.
  std::int32_t num_speculative_tokens = 0;

  /// The watchdog reports a step that takes longer than this many seconds; 0 = never.
  double stuck_step_seconds = 60.0;

  /// Gets the watchdog's reports, on its thread; empty = standard error.
  std::function<void(const std::string&)> on_stuck_step;

  /// Tokens that end a request unless it says ignore_eos.
  std::vector<TokenId> eos_token_ids;
};

/// What the KV memory buys.
struct KvMemory {
  struct Group {
    std::int32_t window = 0;  ///< tokens; 0 = all
    std::int64_t bytes_per_block = 0;
    std::int32_t device_blocks = 0;
    std::int32_t host_blocks = 0;
  };
  std::vector<Group> groups;
  std::int32_t tokens_per_block = 0;
  std::int32_t max_seq_len = 0;           ///< context length: the engine's, or what the memory holds if less
  std::int64_t tokens = 0;                ///< of one sequence after another in the first group
  std::int32_t sequences_at_max_len = 0;  ///< that fit at a time
  std::int64_t device_bytes = 0;
  std::int64_t host_bytes = 0;
};

/// The in-flight-batching loop on a thread of its own: requests join and leave the batch at every step.
///
/// A request is `submit`ted, answers as Responses through `poll` (those of each sequence end with a finish_reason), and
/// may be `cancel`led at any time. A failure ends the sequence it belongs to; a step that throws ends the sequences of
/// that step; the loop goes on. While a step runs the next one is planned and grammar masks are made, on a second
/// thread. All methods are thread-safe.
class GptManager {
 public:
  /// Reserves the KV memory and starts the loop. Throws Error(kInvalidRequest) with the field's name for a limit that
  /// is out of range, and whatever runner->allocate_kv throws. `proposer` may be null.
  GptManager(std::unique_ptr<ModelRunner> runner, ManagerConfig config, std::unique_ptr<DraftProposer> proposer = {});

  /// As shutdown(false).
  ~GptManager();
  GptManager(const GptManager&) = delete;
  GptManager& operator=(const GptManager&) = delete;

  /// Queues a request. Throws, and then nothing has happened: Error(kInvalidRequest) with the field's name,
  /// kContextTooLong where the prompt leaves no room for one token, kOverloaded where the queue is full, kCancelled
  /// after shutdown.
  RequestId submit(Request request);

  /// Ends a request, or one sequence of it (`sequence_index` ≥ 0), in whatever state before the next step; its last
  /// response says cancelled. No-op for a finished or unknown one.
  void cancel(RequestId id, std::int32_t sequence_index = -1);

  /// All responses that are ready, of any request, in order. Waits up to `timeout` for the first one; returns none on
  /// time-out, and at once after shutdown when nothing is left. Each response goes to one caller only.
  std::vector<Response> poll(std::chrono::duration<double> timeout);

  Stats stats() const;

  /// The steps since the last call, at most the latest 1024.
  std::vector<StepStats> step_stats();

  /// Events of the prefix tree since the last call, at most max_kv_events.
  std::vector<KvEvent> kv_events();

  const KvMemory& memory() const;

  /// Forgets all cached prefixes before the next step. Throws Error(kCancelled) after shutdown.
  void clear_prefix_cache();

  /// Makes an adapter available to requests from the next step on, and waits until it is. `id` is new, ≥ 1. Throws what
  /// ModelRunner::load_adapter throws, Error(kInvalidRequest) for an id that is loaded, kCancelled after shutdown.
  void load_adapter(AdapterId id, const Adapter& adapter);

  /// Takes no more requests for an adapter, and frees it once none uses it. No-op for an unknown id.
  void unload_adapter(AdapterId id);

  /// Refuses new requests and joins the loop, once what is queued and running has finished (`drain`) or has been
  /// cancelled. Idempotent; a second call with drain=false cuts a draining one short.
  void shutdown(bool drain = false);

  /// As ModelRunner's.
  std::string tactics_note() const;
  /// Context length: the engine's, or fewer tokens where the KV blocks hold fewer.
  std::int32_t max_seq_len() const;
  std::int32_t vocab_size() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace aotllm
