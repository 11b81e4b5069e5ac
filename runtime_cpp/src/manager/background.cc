#include "manager/background.h"

namespace aotllm {

BackgroundThread::BackgroundThread() : thread_([this] { loop(); }) {}

BackgroundThread::~BackgroundThread() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void BackgroundThread::start(const std::function<void()>& job) {
  {
    const std::lock_guard lock(mutex_);
    job_ = &job;
  }
  changed_.notify_all();
}

void BackgroundThread::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return job_ == nullptr; });
}

void BackgroundThread::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return job_ != nullptr || closing_; });
    if (job_ == nullptr) {
      return;
    }
    const std::function<void()>* job = job_;
    lock.unlock();
    (*job)();
    lock.lock();
    job_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace aotllm
