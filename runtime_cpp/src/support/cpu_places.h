#pragma once

#include <atomic>
#include <vector>

namespace aotllm {

/// Keeps threads that work together on CPUs of their own. The kernel wakes a thread where it has slept or where it is
/// woken from, also where another one of them runs while a CPU next to it is idle; threads that wait for each other
/// then take turns on one CPU, and as one of them always sleeps, the kernel sees nothing to move for many milliseconds.
/// Nobody is bound to a CPU: other programs may take it, and the kernel may move the thread.
class CpuPlaces {
 public:
  explicit CpuPlaces(int num_threads);

  /// On thread `index` of the first `count`, which work together now, when it begins and when it has slept: notes its
  /// CPU. If another of them was there when it noted its own, and the calling thread may run on a CPU that none of them
  /// has noted, goes there.
  void settle(int index, int count) noexcept;

  /// The CPU that a thread has noted; -1 before the first time.
  int noted(int index) const noexcept { return cpus_[static_cast<std::size_t>(index)].load(std::memory_order_relaxed); }

 private:
  bool is_noted(int cpu, int but, int count) const noexcept;

  std::vector<std::atomic<int>> cpus_;  ///< by thread
};

}  // namespace aotllm
