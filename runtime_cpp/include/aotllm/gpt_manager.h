#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "aotllm/model_runner.h"
#include "aotllm/request.h"
#include "aotllm/stats.h"

namespace aotllm {

/// Limits of a manager. 0 takes what the engine was built for, where it says so.
struct ManagerConfig {
  /// Threads of the runner; 0 = all that this process may use. The manager's own thread is extra and mostly asleep.
  std::int32_t num_threads = 0;

  /// KV blocks; 0 = enough for max_batch_size sequences of the engine's max_seq_len, at most a quarter of the free
  /// memory, though at least one such sequence where memory has room for it. Fewer blocks than a sequence of
  /// max_seq_len needs shorten the context length.
  std::int32_t num_kv_blocks = 0;

  /// Most sequences in a step; 0 = the engine's, which is the most allowed.
  std::int32_t max_batch_size = 0;

  /// Most tokens in a step over all sequences; 0 = the engine's, which is the most allowed.
  std::int32_t max_num_tokens = 0;

  /// Largest context chunk of one request in one step; 0 = no limit below max_num_tokens.
  std::int32_t max_chunk_tokens = 0;

  /// Most requests that wait although the batch or the KV memory is full; one more is Overloaded. ≥ 0.
  std::int32_t max_queue_size = 1024;

  /// Tokens that end a request unless it says ignore_eos.
  std::vector<TokenId> eos_token_ids;
};

/// The in-flight-batching loop on a thread of its own: requests join and leave the batch at every step.
///
/// A request is `submit`ted, answers as Responses through `poll` (one per generated token, the last with a
/// finish_reason), and may be `cancel`led at any time. A failure ends the request it belongs to; a step that throws
/// ends the requests of that step; the loop goes on. All methods are thread-safe.
class GptManager {
 public:
  /// Reserves the KV memory and starts the loop. Throws Error(kInvalidRequest) with the field's name for a limit that
  /// is out of range, and whatever runner->allocate_kv throws.
  GptManager(std::unique_ptr<ModelRunner> runner, ManagerConfig config);

  /// As shutdown(false).
  ~GptManager();
  GptManager(const GptManager&) = delete;
  GptManager& operator=(const GptManager&) = delete;

  /// Queues a request. Throws, and then nothing has happened: Error(kInvalidRequest) with the field's name,
  /// kContextTooLong where the prompt leaves no room for one token, kOverloaded where the queue is full, kCancelled
  /// after shutdown.
  RequestId submit(Request request);

  /// Ends a request in whatever state before the next step; its last response says cancelled. No-op for a finished or
  /// unknown id.
  void cancel(RequestId id);

  /// All responses that are ready, of any request, in order. Waits up to `timeout` for the first one; returns none on
  /// time-out, and at once after shutdown when nothing is left. Each response goes to one caller only.
  std::vector<Response> poll(std::chrono::duration<double> timeout);

  Stats stats() const;

  /// Refuses new requests and joins the loop, once what is queued and running has finished (`drain`) or has been
  /// cancelled. Idempotent; a second call with drain=false cuts a draining one short.
  void shutdown(bool drain = false);

  /// Context length: the engine's, or fewer tokens where the KV blocks hold fewer.
  std::int32_t max_seq_len() const;
  std::int32_t vocab_size() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace aotllm
