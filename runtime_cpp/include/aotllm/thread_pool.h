#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace aotllm {

class CpuPlaces;

/// A fixed number of threads for fork-join regions with barriers inside, perhaps divided into teams that have barriers
/// of their own. The calling thread is member 0.
///
/// Waiting spins for some hundred microseconds, more than the distance between two ops or two steps, and then parks: an
/// idle pool burns no CPU. Nobody is woken by a system call who is not parked, and who finds another thread of the pool
/// on the CPU where it is woken goes to one that is free. Not thread-safe: one thread calls `parallel`, and regions do
/// not nest.
class ThreadPool {
 public:
  /// Of `num_threads` ≥ 1 in all, the caller included, in 1 to `num_threads` teams of consecutive threads whose sizes
  /// differ by at most one. Throws Error(kInternal) for other numbers, std::system_error where the system has no more
  /// threads.
  explicit ThreadPool(int num_threads, int num_teams = 1);
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Threads that take part in regions: all, until `resize`.
  int num_threads() const noexcept { return num_threads_; }
  /// Those that there are.
  int capacity() const noexcept { return capacity_; }

  /// Regions from now on are run by the first `num_threads` threads, in as many teams as before; the others are not
  /// woken. Outside of regions. Throws Error(kInternal) for less than a thread in each team or more than there are.
  void resize(int num_threads);

  /// A thread's place.
  struct Member {
    int team = 0;
    int index = 0;  ///< in the team
    int count = 0;  ///< threads of the team
  };
  Member member(int thread) const noexcept { return members_[static_cast<std::size_t>(thread)]; }

  /// Runs fn(thread_index, num_threads) once on every thread and returns when all are done. Where some throw, the
  /// others are released from their barriers and the first exception is rethrown here. Allocates nothing.
  template <class Fn>
  void parallel(Fn&& fn) {
    using Task = std::remove_reference_t<Fn>;
    run({[](void* task, int index, int count) { (*static_cast<Task*>(task))(index, count); },
         const_cast<void*>(static_cast<const void*>(&fn))});
  }

  /// Inside a region: returns when every thread of it has arrived; what was written before it is visible after it.
  /// Every thread must call it the same number of times. Throws to unwind the region where another thread failed.
  void barrier() { wait_at(barriers_.front()); }
  /// The same among the threads of `team`, which is the caller's.
  void barrier(int team) { wait_at(barrier_of(team)); }

  /// Inside a region: 0, 1, 2, … to whichever thread of `team` asks next, from 0 again after each barrier of the team
  /// or of all. For work that is dealt out as threads get to it.
  std::uint32_t next(int team) noexcept { return barrier_of(team).dealt.fetch_add(1, std::memory_order_relaxed); }

 private:
  struct Job {
    void (*call)(void* task, int index, int count) = nullptr;
    void* task = nullptr;
  };
  /// A number that goes up and is waited for. What was written before `advance` is visible after `wait_beyond`.
  class Signal {
   public:
    std::uint32_t value() const noexcept { return value_.load(std::memory_order_acquire); }
    void advance() noexcept;
    /// Returns once the number is no longer `old`. Parks after `spin`; whether it has.
    bool wait_beyond(std::uint32_t old, std::chrono::microseconds spin) noexcept;

   private:
    // On one line: who advances has it anyway and looks there for those who are parked.
    alignas(64) std::atomic<std::uint32_t> value_{0};
    std::atomic<std::uint32_t> parked_{0};
  };
  /// Counters on lines of their own: each is written by many threads while others poll.
  struct Barrier {
    alignas(64) std::atomic<std::uint32_t> arrived{0};
    alignas(64) std::atomic<std::uint32_t> dealt{0};  ///< by `next`
    Signal phase;                                     ///< its change is the reversal of the barrier's sense
    std::uint32_t size = 0;
  };

  Barrier& barrier_of(int team) noexcept {
    return barriers_[barriers_.size() == 1 ? 0 : static_cast<std::size_t>(team) + 1];
  }
  int num_teams() const noexcept { return barriers_.size() == 1 ? 1 : static_cast<int>(barriers_.size()) - 1; }
  void divide_into_teams();
  void wait_at(Barrier& barrier);
  int self() const noexcept;
  void run(Job job);
  void work(int index);
  void execute(int index) noexcept;
  void fail(std::exception_ptr error) noexcept;
  void join() noexcept;

  const int capacity_;
  int num_threads_;
  const std::chrono::microseconds spin_;  ///< before parking; 0 where threads outnumber CPUs
  Job job_;
  std::exception_ptr error_;
  std::mutex error_mutex_;
  std::atomic<bool> failed_{false};
  bool stop_ = false;
  std::vector<Member> members_;    ///< by thread
  std::vector<Barrier> barriers_;  ///< of all threads; then, where there are several teams, of each

  std::unique_ptr<CpuPlaces> places_;  ///< null where threads outnumber CPUs

  std::vector<Signal> starts_;                         ///< by thread: the change of its own starts a worker
  alignas(64) std::atomic<std::uint32_t> running_{0};  ///< workers not yet done with the region
  Signal done_;                                        ///< they all are

  std::vector<std::thread> threads_;
};

}  // namespace aotllm
