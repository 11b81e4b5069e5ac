#include "support/cpu_places.h"

#include <sched.h>

namespace aotllm {

CpuPlaces::CpuPlaces(int num_threads) : cpus_(static_cast<std::size_t>(num_threads)) {
  for (std::atomic<int>& cpu : cpus_) cpu.store(-1, std::memory_order_relaxed);
}

bool CpuPlaces::is_noted(int cpu, int but, int count) const noexcept {
  for (int thread = 0; thread < count; ++thread) {
    if (thread != but && noted(thread) == cpu) return true;
  }
  return false;
}

void CpuPlaces::settle(int index, int count) noexcept {
  const int cpu = ::sched_getcpu();
  std::atomic<int>& place = cpus_[static_cast<std::size_t>(index)];
  if (place.load(std::memory_order_relaxed) != cpu) place.store(cpu, std::memory_order_relaxed);
  if (cpu < 0 || !is_noted(cpu, index, count)) return;
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;  // more CPUs than a cpu_set_t has room for
  for (int other = 0; other < CPU_SETSIZE; ++other) {
    if (!CPU_ISSET(other, &allowed) || is_noted(other, index, count)) continue;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(other, &only);
    if (::sched_setaffinity(0, sizeof(only), &only) != 0) continue;  // it has gone offline
    ::sched_setaffinity(0, sizeof(allowed), &allowed);
    place.store(other, std::memory_order_relaxed);
    return;
  }
}

}  // namespace aotllm
