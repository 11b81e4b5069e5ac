#include "aotllm/thread_pool.h"

#include <algorithm>
#include <climits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "aotllm/errors.h"
#include "support/cpu_places.h"
#include "support/cpu_topology.h"
#include "support/strings.h"

namespace aotllm {
namespace {

// Threads of a step wait for each other some microseconds: one that is late by more has lost its CPU to something else,
// and gets another one when who waits for it parks. Workers wait for the next step about as long as it takes to give
// out the tokens of this one. To park and be woken takes some fifty microseconds.
constexpr std::chrono::microseconds kSpinInStep{60};
constexpr std::chrono::microseconds kSpin{300};
constexpr int kPollsPerLook = 32;  // at the clock

/// Unwinds a region whose other thread failed; never leaves the pool.
struct RegionAborted {};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

int checked(int num_threads, int num_teams, int most) {
  if (num_teams < 1 || num_threads < num_teams || num_threads > most) {
    throw Error(ErrorKind::kInternal,
                cat("thread pool: expected at least 1 thread in each of at least 1 team and at most ", most, ", got ",
                    num_threads, " threads and ", num_teams, " teams"));
  }
  return num_threads;
}

}  // namespace

void ThreadPool::Signal::advance() noexcept {
  // Both in one total order with what `wait_beyond` does: either the parked thread is seen here, or it sees the new
  // value before it sleeps.
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) != 0) value_.notify_all();
}

bool ThreadPool::Signal::wait_beyond(std::uint32_t old, std::chrono::microseconds spin) noexcept {
  const auto poll = [&] {
    for (int i = 0; i < kPollsPerLook; ++i) {
      if (value() != old) return true;
      pause();
    }
    return value() != old;
  };
  if (spin.count() > 0) {
    if (poll()) return false;  // as a rule, before there is a clock to look at
    const auto until = std::chrono::steady_clock::now() + spin;
    do {
      if (poll()) return false;
    } while (std::chrono::steady_clock::now() < until);
  }
  parked_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == old) value_.wait(old, std::memory_order_seq_cst);
  parked_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

ThreadPool::ThreadPool(int num_threads, int num_teams)
    : capacity_(checked(num_threads, num_teams, INT_MAX)),
      num_threads_(num_threads),
      spin_(num_threads <= default_num_threads() ? kSpin : std::chrono::microseconds(0)),
      barriers_(num_teams == 1 ? 1 : static_cast<std::size_t>(num_teams) + 1),
      starts_(static_cast<std::size_t>(num_threads)) {
  divide_into_teams();
  if (num_threads > 1 && spin_.count() > 0) places_ = std::make_unique<CpuPlaces>(num_threads);
  threads_.reserve(capacity_ - 1);
  try {
    for (int index = 1; index < capacity_; ++index) threads_.emplace_back([this, index] { work(index); });
  } catch (...) {
    join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  join();
}

void ThreadPool::resize(int num_threads) {
  if (num_threads == num_threads_) return;
  num_threads_ = checked(num_threads, num_teams(), capacity_);
  divide_into_teams();
}

void ThreadPool::divide_into_teams() {
  const int teams = num_teams();
  members_.clear();
  barriers_.front().size = static_cast<std::uint32_t>(num_threads_);
  for (int team = 0; team < teams; ++team) {
    const auto bound = [&](int t) { return static_cast<int>(std::int64_t{num_threads_} * t / teams); };
    const int count = bound(team + 1) - bound(team);
    for (int index = 0; index < count; ++index) members_.push_back({team, index, count});
    if (teams > 1) barriers_[static_cast<std::size_t>(team) + 1].size = static_cast<std::uint32_t>(count);
  }
}

void ThreadPool::join() noexcept {
  stop_ = true;  // published by the starts
  for (Signal& start : starts_) start.advance();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::work(int index) {
  for (std::uint32_t seen = 0;; ++seen) {
    const bool has_slept = starts_[static_cast<std::size_t>(index)].wait_beyond(seen, spin_);
    if (stop_) return;
    if (has_slept && places_) places_->settle(index, num_threads_);
    execute(index);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.advance();
  }
}

/// The calling thread's index. To be asked seldom.
int ThreadPool::self() const noexcept {
  const std::thread::id id = std::this_thread::get_id();
  const auto found =
      std::find_if(threads_.begin(), threads_.end(), [&](const std::thread& thread) { return thread.get_id() == id; });
  return found == threads_.end() ? 0 : static_cast<int>(found - threads_.begin()) + 1;
}

void ThreadPool::run(Job job) {
  if (places_) places_->settle(0, num_threads_);  // it may have slept since the last one
  job_ = job;
  failed_.store(false, std::memory_order_relaxed);
  for (Barrier& barrier : barriers_) {
    barrier.arrived.store(0, std::memory_order_relaxed);
    barrier.dealt.store(0, std::memory_order_relaxed);
  }
  if (num_threads_ == 1) {
    execute(0);
  } else {
    running_.store(static_cast<std::uint32_t>(num_threads_ - 1), std::memory_order_relaxed);
    const std::uint32_t before = done_.value();
    for (int index = 1; index < num_threads_; ++index) starts_[static_cast<std::size_t>(index)].advance();
    execute(0);
    done_.wait_beyond(before, std::min(spin_, kSpinInStep));
  }
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
  for (Barrier& barrier : barriers_) barrier.phase.advance();  // releases those who wait there
}

void ThreadPool::wait_at(Barrier& barrier) {
  const std::uint32_t phase = barrier.phase.value();
  // A thread that fails sets the flag, then ends the phase: who has read the phase before sees it end, who reads it now
  // sees the flag.
  if (failed_.load(std::memory_order_acquire)) throw RegionAborted{};
  if (barrier.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == barrier.size) {
    barrier.arrived.store(0, std::memory_order_relaxed);
    barrier.dealt.store(0, std::memory_order_relaxed);
    if (&barrier == barriers_.data()) {
      for (Barrier& team : barriers_) team.dealt.store(0, std::memory_order_relaxed);
    }
    if (barrier.size > 1) barrier.phase.advance();
  } else {
    if (barrier.phase.wait_beyond(phase, std::min(spin_, kSpinInStep)) && places_)
      places_->settle(self(), num_threads_);
    if (failed_.load(std::memory_order_acquire)) throw RegionAborted{};
  }
}

}  // namespace aotllm
