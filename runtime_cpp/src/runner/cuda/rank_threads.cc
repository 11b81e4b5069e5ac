#include "runner/cuda/rank_threads.h"

#include <utility>

namespace aotllm::cuda {

RankThreads::RankThreads(int size) {
  for (int rank = 1; rank < size; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
}

RankThreads::~RankThreads() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  begun_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void RankThreads::run(const std::function<void(int)>& work, const std::function<void()>& on_failure) {
  {
    const std::lock_guard lock(mutex_);
    work_ = &work;
    on_failure_ = &on_failure;
    busy_ = static_cast<int>(threads_.size());
    failure_ = nullptr;
    ++turn_;
  }
  begun_.notify_all();
  work_guarded(0);
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return busy_ == 0; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void RankThreads::serve(int rank) {
  unsigned done = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      begun_.wait(lock, [&] { return turn_ != done || closing_; });
      if (closing_) return;
      done = turn_;
    }
    work_guarded(rank);
    const std::lock_guard lock(mutex_);
    if (--busy_ == 0) ended_.notify_one();
  }
}

void RankThreads::work_guarded(int rank) {
  try {
    (*work_)(rank);
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
    (*on_failure_)();
  }
}

}  // namespace aotllm::cuda
