#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace aotllm {

/// Does one job beside what its owner does: `start` a job, do something else, `wait` for its end.
class Background {
 public:
  virtual ~Background() = default;

  /// `job` lives until `wait` returns, and does not throw.
  virtual void start(const std::function<void()>& job) = 0;
  virtual void wait() = 0;
};

/// Does the job at once, in the owner's own time.
class InlineBackground final : public Background {
 public:
  void start(const std::function<void()>& job) override { job(); }
  void wait() override {}
};

/// Does the job on a thread of its own, which sleeps between jobs.
class BackgroundThread final : public Background {
 public:
  BackgroundThread();
  ~BackgroundThread() override;
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;

  void start(const std::function<void()>& job) override;
  void wait() override;

 private:
  void loop();

  std::mutex mutex_;  ///< of the next two
  const std::function<void()>* job_ = nullptr;
  bool closing_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace aotllm
