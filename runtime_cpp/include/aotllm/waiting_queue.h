#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "aotllm/scheduler.h"

namespace aotllm {

/// The sequences that wait, in the order of a queue policy: overdue ones by id, then preempted ones by rank (the head
/// of the queue), then the others by policy. All operations are logarithmic in their number.
class WaitingQueue {
 public:
  struct Entry {
    SequenceId id = 0;
    std::int32_t priority = 0;
    std::int64_t arrival_step = 0;  ///< when it began to wait
    bool overdue = false;           ///< from an earlier wait
    bool preempted = false;
  };

  /// Cached tokens of a waiting sequence; asked for kLongestPrefix only, at insertion and in `advance`.
  using CachedTokens = std::function<std::int32_t(SequenceId)>;

  /// Throws Error(kInternal) for max_wait_steps < 1, or kLongestPrefix without `cached_tokens`.
  WaitingQueue(QueuePolicy policy, std::int64_t max_wait_steps, CachedTokens cached_tokens = {});
  ~WaitingQueue();

  /// Throws Error(kInternal) for an id that waits already.
  void insert(const Entry& entry);

  /// No-op for an id that does not wait.
  void erase(SequenceId id);

  bool contains(SequenceId id) const;
  std::size_t size() const;

  /// Marks as overdue who has waited for max_wait_steps at step `now`; for kLongestPrefix asks anew for the cached
  /// tokens of the first entry and of a few others, in turn, so that the order follows the cache. Returns who became
  /// overdue, longest wait first. `now` never goes back.
  std::vector<SequenceId> advance(std::int64_t now);

  /// The first `count` ids at most, in order.
  std::vector<SequenceId> front(std::size_t count) const;

  /// Throws Error(kInternal) where its parts contradict each other.
  void check_invariants() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace aotllm
