#include "manager/response_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace aotllm {

void ResponseQueue::push(std::vector<Response>& responses) {
  if (responses.empty()) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    responses_.insert(responses_.end(), std::make_move_iterator(responses.begin()),
                      std::make_move_iterator(responses.end()));
  }
  responses.clear();
  ready_.notify_one();  // one taker takes all
}

void ResponseQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  ready_.notify_all();
}

std::vector<Response> ResponseQueue::pop_all(std::chrono::duration<double> timeout) {
  // A century, in place of infinity, stays clear of overflow in the clock's integers; NaN is 0.
  constexpr std::chrono::duration<double> kForever = std::chrono::hours(24 * 365 * 100);
  const auto wait = timeout.count() > 0 ? std::min(timeout, kForever) : std::chrono::duration<double>(0);
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(wait);
  std::unique_lock lock(mutex_);
  ready_.wait_until(lock, deadline, [this] { return closed_ || !responses_.empty(); });
  return std::exchange(responses_, {});
}

}  // namespace aotllm
