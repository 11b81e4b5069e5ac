#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace aotllm::cuda {

/// A thread for each rank but the first, whose work the caller does.
class RankThreads {
 public:
  explicit RankThreads(int size);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  /// Does work(rank) for all ranks at the same time and returns when all have ended. Where some throw, `on_failure` is
  /// called by each of them at once, so that it can free the others from waiting; then the first of the exceptions goes
  /// on to the caller.
  void run(const std::function<void(int)>& work, const std::function<void()>& on_failure = [] {});

 private:
  void serve(int rank);
  void work_guarded(int rank);

  std::mutex mutex_;
  std::condition_variable begun_;
  std::condition_variable ended_;
  const std::function<void(int)>* work_ = nullptr;
  const std::function<void()>* on_failure_ = nullptr;
  unsigned turn_ = 0;
  int busy_ = 0;
  bool closing_ = false;
  std::exception_ptr failure_;
  std::vector<std::thread> threads_;
};

}  // namespace aotllm::cuda
