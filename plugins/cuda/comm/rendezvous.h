#pragma once

#include <condition_variable>
#include <mutex>

#include "aotllm/errors.h"

namespace aotllm::cuda {

/// A barrier of threads that can be called off.
class Rendezvous {
 public:
  explicit Rendezvous(int size) : size_(size) {}

  /// Waits until `size` threads have called it. Throws Error(kInternal) once `abort` was called.
  void meet() {
    std::unique_lock lock(mutex_);
    const unsigned turn = turn_;
    if (++waiting_ == size_) {
      waiting_ = 0;
      ++turn_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return turn_ != turn || aborted_; });
    }
    if (aborted_) throw Error(ErrorKind::kInternal, "another rank has failed");
  }

  void abort() noexcept {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  unsigned turn_ = 0;
  bool aborted_ = false;
};

}  // namespace aotllm::cuda
