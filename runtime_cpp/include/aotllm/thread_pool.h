#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace aotllm {

/// A fixed team of threads for fork-join regions with barriers inside. The calling thread is member 0.
///
/// Waiting spins for some tens of microseconds, the distance between two ops, and then parks: an idle pool burns no
/// CPU. Not thread-safe: one thread calls `parallel`, and regions do not nest.
class ThreadPool {
 public:
  /// `num_threads` ≥ 1 in all, the caller included. Throws Error(kInternal) otherwise, std::system_error where the
  /// system has no more threads.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const noexcept { return num_threads_; }

  /// Runs fn(thread_index, num_threads) once on every thread and returns when all are done. Where some throw, the
  /// others are released from their barriers and the first exception is rethrown here. Allocates nothing.
  template <class Fn>
  void parallel(Fn&& fn) {
    using Task = std::remove_reference_t<Fn>;
    run({[](void* task, int index, int count) { (*static_cast<Task*>(task))(index, count); },
         const_cast<void*>(static_cast<const void*>(&fn))});
  }

  /// Inside a region: returns when every thread has arrived; what was written before it is visible after it. Every
  /// thread must call it the same number of times. Throws to unwind the region where another thread failed.
  void barrier();

 private:
  struct Job {
    void (*call)(void* task, int index, int count) = nullptr;
    void* task = nullptr;
  };

  void run(Job job);
  void work(int index);
  void execute(int index) noexcept;
  void fail(std::exception_ptr error) noexcept;
  void join() noexcept;

  const int num_threads_;
  const int spins_;  ///< polls before parking; 0 where threads outnumber CPUs
  Job job_;
  std::exception_ptr error_;
  std::mutex error_mutex_;
  std::atomic<bool> failed_{false};
  bool stop_ = false;

  // Counters on lines of their own: each is polled by all threads.
  alignas(64) std::atomic<std::uint32_t> generation_{0};  ///< of regions; its change starts the workers
  alignas(64) std::atomic<std::uint32_t> running_{0};     ///< workers not yet done with the region
  alignas(64) std::atomic<std::uint32_t> arrived_{0};     ///< at the barrier
  alignas(64) std::atomic<std::uint32_t> phase_{0};       ///< of the barrier: its change is the reversal of its sense

  std::vector<std::thread> threads_;
};

}  // namespace aotllm
