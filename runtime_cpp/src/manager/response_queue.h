#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "aotllm/request.h"

namespace aotllm {

/// Hands responses from the loop's thread to those who poll. Thread-safe.
class ResponseQueue {
 public:
  /// Appends `responses` and leaves it empty.
  void push(std::vector<Response>& responses);

  /// No more responses will come: wakes everyone who waits, now and from now on.
  void close();

  /// All responses there are; waits up to `timeout` for the first one. Empty on time-out or when closed and drained.
  std::vector<Response> pop_all(std::chrono::duration<double> timeout);

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Response> responses_;
  bool closed_ = false;
};

}  // namespace aotllm
