#include "aotllm/gpt_manager.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <future>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "aotllm/errors.h"
#include "manager/background.h"
#include "manager/inflight_batcher.h"
#include "manager/limits.h"
#include "manager/response_queue.h"
#include "manager/sequence.h"
#include "manager/watchdog.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr std::size_t kKeptSteps = 1024;

std::uint64_t random_seed() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

void print_report(const std::string& report) {
  std::fprintf(stderr, "aotllm: watchdog: %s\n", report.c_str());
}

KvAllocation allocation(const KvMemory& memory) {
  KvAllocation allocation;
  for (std::size_t group = 0; group < memory.groups.size(); ++group) {
    allocation.device_blocks[group] = memory.groups[group].device_blocks;
    allocation.host_blocks[group] = memory.groups[group].host_blocks;
  }
  return allocation;
}

/// Appends and drops the oldest beyond `most`.
template <class T>
void append_bounded(std::deque<T>& kept, std::vector<T> news, std::size_t most) {
  kept.insert(kept.end(), std::make_move_iterator(news.begin()), std::make_move_iterator(news.end()));
  if (kept.size() > most) {
    kept.erase(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(kept.size() - most));
  }
}

template <class T>
std::vector<T> take(std::deque<T>& kept) {
  std::vector<T> taken(std::make_move_iterator(kept.begin()), std::make_move_iterator(kept.end()));
  kept.clear();
  return taken;
}

}  // namespace

/// The loop's thread owns the runner and the batcher; callers leave work in `inbox_` and take from `responses_`.
class GptManager::Impl {
 public:
  Impl(std::unique_ptr<ModelRunner> runner, const ManagerConfig& config, std::unique_ptr<DraftProposer> proposer)
      : runner_(std::move(runner)),
        proposer_(std::move(proposer)),
        limits_(resolve_limits(runner_->shape(), config, runner_->free_memory())),
        watchdog_(config.stuck_step_seconds, config.on_stuck_step ? config.on_stuck_step : print_report),
        batcher_(*runner_, limits_, {proposer_.get(), &background_, &watchdog_}) {
    runner_->allocate_kv(allocation(limits_.kv_memory));
    stats_ = batcher_.stats();
    thread_ = std::thread([this] { loop(); });
  }

  RequestId submit(Request&& request);
  void cancel(RequestId id, std::int32_t sequence_index);
  std::vector<Response> poll(std::chrono::duration<double> timeout) { return responses_.pop_all(timeout); }
  Stats stats() const;
  std::vector<StepStats> step_stats();
  std::vector<KvEvent> kv_events();
  void between_steps(const std::function<void()>& action);
  void clear_prefix_cache() {
    between_steps([this] { batcher_.clear_cache(); });
  }
  void load_adapter(AdapterId id, const Adapter& adapter);
  void unload_adapter(AdapterId id);
  void shutdown(bool drain);
  std::string tactics_note() const { return runner_->tactics_note(); }
  const Limits& limits() const { return limits_; }

 private:
  enum class Mode : std::uint8_t { kServing, kDraining, kCancelling };

  struct Cancellation {
    RequestId request = 0;
    std::int32_t sequence_index = -1;
  };

  /// What callers left for the loop since its last step.
  struct Inbox {
    std::vector<std::unique_ptr<Sequence>> submitted;
    std::vector<Cancellation> cancelled;
    std::vector<std::packaged_task<void()>> actions;
    std::vector<AdapterId> unloaded;
    std::int64_t submitted_tokens = 0;  ///< prompt tokens of `submitted`
    bool empty() const { return submitted.empty() && cancelled.empty() && actions.empty() && unloaded.empty(); }
  };

  void loop();
  void step(Inbox inbox, Mode mode);
  void publish();
  void free_adapters();
  void check_room(std::size_t num_sequences, std::int64_t num_tokens) const;

  std::unique_ptr<ModelRunner> runner_;
  std::unique_ptr<DraftProposer> proposer_;
  const Limits limits_;
  BackgroundThread background_;
  Watchdog watchdog_;
  InflightBatcher batcher_;          ///< the loop's own, as the next one
  std::vector<AdapterId> retiring_;  ///< adapters to free once no sequence uses them

  std::atomic<RequestId> next_request_{1};
  std::atomic<SequenceId> next_sequence_{1};

  mutable std::mutex mutex_;  ///< of all below, up to responses_
  std::condition_variable wake_;
  Mode mode_ = Mode::kServing;
  Inbox inbox_;
  Stats stats_;                     ///< the batcher's, as published last
  std::int64_t queued_tokens_ = 0;  ///< likewise
  bool saturated_ = false;          ///< likewise
  std::deque<StepStats> step_stats_;
  std::deque<KvEvent> kv_events_;
  std::set<AdapterId> adapters_;  ///< that requests may name

  ResponseQueue responses_;
  std::mutex join_mutex_;  ///< of thread_
  std::thread thread_;
};

RequestId GptManager::Impl::submit(Request&& request) {
  validate_request(request, limits_);
  const auto now = Clock::now();
  const RequestId id = next_request_.fetch_add(1);
  const SequenceId first = next_sequence_.fetch_add(request.n);
  const std::uint64_t seed = random_seed();
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (std::int32_t i = 0; i < request.n; ++i) {
    sequences.push_back(std::make_unique<Sequence>(id, i, request, seed, now, limits_));
    sequences.back()->id = first + i;
  }
  const auto num_tokens = static_cast<std::int64_t>(request.prompt_token_ids.size()) * request.n;
  const std::lock_guard lock(mutex_);
  if (mode_ != Mode::kServing) {
    throw Error(ErrorKind::kCancelled, "the manager is shut down; it takes no more requests");
  }
  if (request.adapter != 0 && !adapters_.contains(request.adapter)) {
    throw Error(ErrorKind::kInvalidRequest, cat("adapter ", request.adapter, " is not loaded"), "adapter");
  }
  check_room(sequences.size(), num_tokens);
  inbox_.submitted.insert(inbox_.submitted.end(), std::make_move_iterator(sequences.begin()),
                          std::make_move_iterator(sequences.end()));
  inbox_.submitted_tokens += num_tokens;
  wake_.notify_one();
  return id;
}

/// Throws Error(kOverloaded) where so many more may not be submitted. Who waits for a free place in the batch alone,
/// since the loop has not come round yet, does not count as queued.
void GptManager::Impl::check_room(std::size_t num_sequences, std::int64_t num_tokens) const {
  const std::int64_t waiting = stats_.queued + static_cast<std::int64_t>(inbox_.submitted.size());
  const auto refuse = [&](const std::string& limit) {
    throw Error(ErrorKind::kOverloaded, cat("the queue is full: ", stats_.running, " sequences run and ", waiting,
                                            " wait (", limit, "). Try again later"));
  };
  const std::int64_t free_places = saturated_ ? 0 : limits_.scheduler.max_batch_size - stats_.running;
  if (limits_.max_queue_size + free_places - waiting < static_cast<std::int64_t>(num_sequences)) {
    refuse(cat("max_queue_size is ", limits_.max_queue_size));
  }
  const std::int64_t waiting_tokens = queued_tokens_ + inbox_.submitted_tokens;
  if (limits_.max_queued_tokens > 0 && waiting_tokens > 0 && waiting_tokens + num_tokens > limits_.max_queued_tokens) {
    refuse(cat(waiting_tokens, " prompt tokens wait, ", num_tokens, " are to come, and max_queued_tokens is ",
               limits_.max_queued_tokens));
  }
}

void GptManager::Impl::cancel(RequestId id, std::int32_t sequence_index) {
  const std::lock_guard lock(mutex_);
  if (id >= 1 && id < next_request_.load() && mode_ != Mode::kCancelling) {
    inbox_.cancelled.push_back({id, sequence_index});
    wake_.notify_one();
  }
}

/// Has the loop do something between two steps, and waits until it has. Passes on what it throws.
void GptManager::Impl::between_steps(const std::function<void()>& action) {
  std::packaged_task<void()> task(action);
  std::future<void> done = task.get_future();
  {
    const std::lock_guard lock(mutex_);
    if (mode_ != Mode::kServing) {
      throw Error(ErrorKind::kCancelled, "the manager is shut down");
    }
    inbox_.actions.push_back(std::move(task));
    wake_.notify_one();
  }
  done.get();
}

void GptManager::Impl::load_adapter(AdapterId id, const Adapter& adapter) {
  between_steps([&] {
    runner_->load_adapter(id, adapter);
    const std::lock_guard lock(mutex_);
    adapters_.insert(id);
  });
}

void GptManager::Impl::unload_adapter(AdapterId id) {
  const std::lock_guard lock(mutex_);
  if (adapters_.erase(id) > 0) {  // no request names it from here on
    inbox_.unloaded.push_back(id);
    wake_.notify_one();
  }
}

/// Frees the adapters that are to go and that no sequence uses any more.
void GptManager::Impl::free_adapters() {
  std::erase_if(retiring_, [this](AdapterId id) {
    if (batcher_.uses_adapter(id)) {
      return false;
    }
    runner_->unload_adapter(id);
    return true;
  });
}

Stats GptManager::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats = stats_;
  stats.queued += static_cast<std::int64_t>(inbox_.submitted.size());
  stats.stuck_steps = watchdog_.num_reports();
  return stats;
}

std::vector<StepStats> GptManager::Impl::step_stats() {
  const std::lock_guard lock(mutex_);
  return take(step_stats_);
}

std::vector<KvEvent> GptManager::Impl::kv_events() {
  const std::lock_guard lock(mutex_);
  return take(kv_events_);
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
      queued_tokens_ += inbox.submitted_tokens;
    }
    try {
      step(std::move(inbox), mode);
    } catch (const std::exception& e) {
      batcher_.fail_all(cat("the batching loop failed: ", e.what()));
      publish();
    }
  }
  responses_.close();
}

void GptManager::Impl::step(Inbox inbox, Mode mode) {
  for (auto& sequence : inbox.submitted) {
    batcher_.add(std::move(sequence));
  }
  for (auto& action : inbox.actions) {
    action();  // what it throws goes to the one who waits for it
  }
  for (const Cancellation& cancelled : inbox.cancelled) {
    batcher_.cancel(cancelled.request, cancelled.sequence_index);
  }
  if (mode == Mode::kCancelling) {
    batcher_.cancel_all();
  }
  batcher_.expire(Clock::now());
  retiring_.insert(retiring_.end(), inbox.unloaded.begin(), inbox.unloaded.end());
  if (!batcher_.idle()) {
    batcher_.plan();
  }
  publish();
  batcher_.run();
  free_adapters();
  publish();
}

/// Makes the batcher's state visible, then its responses: who has seen the last response of a request sees its blocks
/// free, and its place in the queue too.
void GptManager::Impl::publish() {
  {
    const std::lock_guard lock(mutex_);
    stats_ = batcher_.stats();
    queued_tokens_ = batcher_.queued_tokens();
    saturated_ = batcher_.saturated();
    append_bounded(step_stats_, batcher_.take_step_stats(), kKeptSteps);
    append_bounded(kv_events_, batcher_.take_events(), static_cast<std::size_t>(limits_.max_kv_events));
  }
  std::vector<Response> responses = batcher_.take_responses();
  responses_.push(responses);
}

GptManager::GptManager(std::unique_ptr<ModelRunner> runner, ManagerConfig config,
                       std::unique_ptr<DraftProposer> proposer)
    : impl_(std::make_unique<Impl>(std::move(runner), config, std::move(proposer))) {}

GptManager::~GptManager() {
  shutdown(false);
}

RequestId GptManager::submit(Request request) {
  return impl_->submit(std::move(request));
}

void GptManager::cancel(RequestId id, std::int32_t sequence_index) {
  impl_->cancel(id, sequence_index);
}

std::vector<Response> GptManager::poll(std::chrono::duration<double> timeout) {
  return impl_->poll(timeout);
}

Stats GptManager::stats() const {
  return impl_->stats();
}

std::vector<StepStats> GptManager::step_stats() {
  return impl_->step_stats();
}

std::vector<KvEvent> GptManager::kv_events() {
  return impl_->kv_events();
}

void GptManager::clear_prefix_cache() {
  impl_->clear_prefix_cache();
}

const KvMemory& GptManager::memory() const {
  return impl_->limits().kv_memory;
}

void GptManager::load_adapter(AdapterId id, const Adapter& adapter) {
  impl_->load_adapter(id, adapter);
}

void GptManager::unload_adapter(AdapterId id) {
  impl_->unload_adapter(id);
}

void GptManager::shutdown(bool drain) {
  impl_->shutdown(drain);
}

std::string GptManager::tactics_note() const {
  return impl_->tactics_note();
}

std::int32_t GptManager::max_seq_len() const {
  return impl_->limits().max_seq_len;
}

std::int32_t GptManager::vocab_size() const {
  return impl_->limits().vocab_size;
}

}  // namespace aotllm
