#include "aotllm/gpt_manager.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "aotllm/errors.h"
#include "manager/inflight_batcher.h"
#include "manager/limits.h"
#include "manager/response_queue.h"
#include "manager/sequence.h"
#include "support/free_memory.h"

namespace aotllm {
namespace {

std::uint64_t random_seed() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

}  // namespace

/// The loop's thread owns the runner and the batcher; callers leave work in `inbox_` and take from `responses_`.
class GptManager::Impl {
 public:
  Impl(std::unique_ptr<ModelRunner> runner, const ManagerConfig& config)
      : runner_(std::move(runner)),
        limits_(resolve_limits(runner_->shape(), config, config.num_kv_blocks == 0 ? free_memory() : std::nullopt)),
        batcher_(*runner_, limits_) {
    runner_->allocate_kv(limits_.num_kv_blocks);
    stats_ = batcher_.stats();
    thread_ = std::thread([this] { loop(); });
  }

  RequestId submit(Request&& request);
  void cancel(RequestId id);
  std::vector<Response> poll(std::chrono::duration<double> timeout) { return responses_.pop_all(timeout); }
  Stats stats() const;
  void shutdown(bool drain);
  const Limits& limits() const { return limits_; }

 private:
  enum class Mode : std::uint8_t { kServing, kDraining, kCancelling };

  /// What callers left for the loop since its last step.
  struct Inbox {
    std::vector<std::unique_ptr<Sequence>> submitted;
    std::vector<RequestId> cancelled;
    bool empty() const { return submitted.empty() && cancelled.empty(); }
  };

  void loop();
  void step(Inbox inbox, Mode mode);
  void publish();
  std::int64_t queue_room() const;

  std::unique_ptr<ModelRunner> runner_;
  const Limits limits_;
  InflightBatcher batcher_;  ///< the loop's own

  mutable std::mutex mutex_;  ///< of all below, up to responses_
  std::condition_variable wake_;
  Mode mode_ = Mode::kServing;
  Inbox inbox_;
  RequestId next_id_ = 1;
  Stats stats_;             ///< the batcher's, as published last
  bool saturated_ = false;  ///< likewise

  ResponseQueue responses_;
  std::mutex join_mutex_;  ///< of thread_
  std::thread thread_;
};

RequestId GptManager::Impl::submit(Request&& request) {
  validate_request(request, limits_);
  auto sequence = std::make_unique<Sequence>(0, std::move(request), random_seed(), limits_);
  {
    const std::lock_guard lock(mutex_);
    if (mode_ != Mode::kServing) {
      throw Error(ErrorKind::kCancelled, "the manager is shut down; it takes no more requests");
    }
    if (queue_room() <= 0) {
      throw Error(ErrorKind::kOverloaded,
                  "the queue is full: " + std::to_string(stats_.running) + " requests run and " +
                      std::to_string(stats_.queued + static_cast<std::int64_t>(inbox_.submitted.size())) +
                      " wait (max_queue_size is " + std::to_string(limits_.max_queue_size) + "). Try again later");
    }
    sequence->id = next_id_;
    inbox_.submitted.push_back(std::move(sequence));
    ++next_id_;
    wake_.notify_one();
    return next_id_ - 1;
  }
}

/// How many more requests may be submitted. Who waits for a free place in the batch alone, since the loop has not come
/// round yet, does not count as queued.
std::int64_t GptManager::Impl::queue_room() const {
  const std::int64_t waiting = stats_.queued + static_cast<std::int64_t>(inbox_.submitted.size());
  const std::int64_t free_places = saturated_ ? 0 : limits_.scheduler.max_batch_size - stats_.running;
  return limits_.max_queue_size + free_places - waiting;
}

void GptManager::Impl::cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  if (id >= 1 && id < next_id_ && mode_ != Mode::kCancelling) {
    inbox_.cancelled.push_back(id);
    wake_.notify_one();
  }
}

Stats GptManager::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats = stats_;
  stats.queued += static_cast<std::int64_t>(inbox_.submitted.size());
  return stats;
}

void GptManager::Impl::shutdown(bool drain) {
  {
    const std::lock_guard lock(mutex_);
    mode_ = std::max(mode_, drain ? Mode::kDraining : Mode::kCancelling);
    wake_.notify_one();
  }
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) {
    thread_.join();
  }
}

void GptManager::Impl::loop() {
  while (true) {
    Inbox inbox;
    Mode mode;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return !batcher_.idle() || !inbox_.empty() || mode_ != Mode::kServing; });
      if (batcher_.idle() && inbox_.empty()) {
        break;  // shut down, and nothing is left
      }
      inbox = std::exchange(inbox_, {});
      mode = mode_;
      stats_.queued += static_cast<std::int64_t>(inbox.submitted.size());
    }
    try {
      step(std::move(inbox), mode);
    } catch (const std::exception& e) {
      batcher_.fail_all(std::string("the batching loop failed: ") + e.what());
      publish();
    }
  }
  responses_.close();
}

void GptManager::Impl::step(Inbox inbox, Mode mode) {
  for (auto& sequence : inbox.submitted) {
    batcher_.add(std::move(sequence));
  }
  for (const RequestId id : inbox.cancelled) {
    batcher_.cancel(id);
  }
  if (mode == Mode::kCancelling) {
    batcher_.cancel_all();
  }
  batcher_.plan();
  publish();
  batcher_.run();
  publish();
}

/// Makes the batcher's state visible, then its responses: who has seen the last response of a request sees its blocks
/// free, and its place in the queue too.
void GptManager::Impl::publish() {
  {
    const std::lock_guard lock(mutex_);
    stats_ = batcher_.stats();
    saturated_ = batcher_.saturated();
  }
  std::vector<Response> responses = batcher_.take_responses();
  responses_.push(responses);
}

GptManager::GptManager(std::unique_ptr<ModelRunner> runner, ManagerConfig config)
    : impl_(std::make_unique<Impl>(std::move(runner), config)) {}

GptManager::~GptManager() {
  shutdown(false);
}

RequestId GptManager::submit(Request request) {
  return impl_->submit(std::move(request));
}

void GptManager::cancel(RequestId id) {
  impl_->cancel(id);
}

std::vector<Response> GptManager::poll(std::chrono::duration<double> timeout) {
  return impl_->poll(timeout);
}

Stats GptManager::stats() const {
  return impl_->stats();
}

void GptManager::shutdown(bool drain) {
  impl_->shutdown(drain);
}

std::int32_t GptManager::max_seq_len() const {
  return impl_->limits().max_seq_len;
}

std::int32_t GptManager::vocab_size() const {
  return impl_->limits().vocab_size;
}

}  // namespace aotllm
