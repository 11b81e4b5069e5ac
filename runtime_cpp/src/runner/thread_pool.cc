#include "aotllm/thread_pool.h"

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "aotllm/errors.h"
#include "support/cpu_topology.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr int kSpins = 2000;  // about 50 µs of pauses

/// Unwinds a region whose other thread failed; never leaves the pool.
struct RegionAborted {};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

/// Waits until `value` is no longer `old`; returns the new one.
std::uint32_t wait_for_change(const std::atomic<std::uint32_t>& value, std::uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (const auto now = value.load(std::memory_order_acquire); now != old) return now;
    pause();
  }
  for (;;) {
    if (const auto now = value.load(std::memory_order_acquire); now != old) return now;
    value.wait(old, std::memory_order_acquire);
  }
}

int checked(int num_threads, int num_teams) {
  if (num_teams < 1 || num_threads < num_teams) {
    throw Error(ErrorKind::kInternal, cat("thread pool: expected at least 1 thread in each of at least 1 team, got ",
                                          num_threads, " threads and ", num_teams, " teams"));
  }
  return num_threads;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, int num_teams)
    : num_threads_(checked(num_threads, num_teams)),
      spins_(num_threads <= default_num_threads() ? kSpins : 0),
      barriers_(num_teams == 1 ? 1 : static_cast<std::size_t>(num_teams) + 1) {
  barriers_.front().size = static_cast<std::uint32_t>(num_threads);
  for (int team = 0; team < num_teams; ++team) {
    const auto bound = [&](int t) { return static_cast<int>(std::int64_t{num_threads} * t / num_teams); };
    const int count = bound(team + 1) - bound(team);
    for (int index = 0; index < count; ++index) members_.push_back({team, index, count});
    if (num_teams > 1) barriers_[static_cast<std::size_t>(team) + 1].size = static_cast<std::uint32_t>(count);
  }
  threads_.reserve(num_threads_ - 1);
  try {
    for (int index = 1; index < num_threads_; ++index) threads_.emplace_back([this, index] { work(index); });
  } catch (...) {
    join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  join();
}

void ThreadPool::join() noexcept {
  stop_ = true;  // published by the release of the new generation
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::work(int index) {
  std::uint32_t seen = 0;
  for (;;) {
    seen = wait_for_change(generation_, seen, spins_);
    if (stop_) return;
    execute(index);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
  }
}

void ThreadPool::run(Job job) {
  job_ = job;
  failed_.store(false, std::memory_order_relaxed);
  for (Barrier& barrier : barriers_) barrier.arrived.store(0, std::memory_order_relaxed);
  running_.store(static_cast<std::uint32_t>(num_threads_ - 1), std::memory_order_relaxed);
  if (num_threads_ > 1) {
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }
  execute(0);
  for (auto left = running_.load(std::memory_order_acquire); left != 0;) left = wait_for_change(running_, left, spins_);
  if (failed_.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::execute(int index) noexcept {
  try {
    job_.call(job_.task, index, num_threads_);
  } catch (const RegionAborted&) {
    // the thread that failed first has left its exception
  } catch (...) {
    fail(std::current_exception());
  }
}

void ThreadPool::fail(std::exception_ptr error) noexcept {
  {
    const std::lock_guard lock(error_mutex_);
    if (!error_) error_ = std::move(error);
  }
  failed_.store(true, std::memory_order_release);
  for (Barrier& barrier : barriers_) {  // releases those who wait there
    barrier.phase.fetch_add(1, std::memory_order_acq_rel);
    barrier.phase.notify_all();
  }
}

void ThreadPool::wait_at(Barrier& barrier) {
  if (barrier.size == 1 && !failed_.load(std::memory_order_acquire)) return;
  const auto phase = barrier.phase.load(std::memory_order_acquire);
  if (failed_.load(std::memory_order_acquire)) throw RegionAborted{};
  if (barrier.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == barrier.size) {
    barrier.arrived.store(0, std::memory_order_relaxed);
    barrier.phase.fetch_add(1, std::memory_order_release);
    barrier.phase.notify_all();
  } else {
    wait_for_change(barrier.phase, phase, spins_);
    if (failed_.load(std::memory_order_acquire)) throw RegionAborted{};
  }
}

}  // namespace aotllm
