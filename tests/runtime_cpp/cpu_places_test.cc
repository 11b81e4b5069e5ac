#include "support/cpu_places.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>
#include <vector>

namespace aotllm {
namespace {

cpu_set_t only(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return set;
}

cpu_set_t mask() {
  cpu_set_t set;
  EXPECT_EQ(::sched_getaffinity(0, sizeof(set), &set), 0);
  return set;
}

std::vector<int> cpus_of(const cpu_set_t& set) {
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

/// On a thread of its own, which may run on `before` and then, when it settles, on `allowed`.
void settle(CpuPlaces& places, int index, const cpu_set_t& before, const cpu_set_t& allowed, int count = 3) {
  std::thread([&] {
    ASSERT_EQ(::sched_setaffinity(0, sizeof(before), &before), 0);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(allowed), &allowed), 0);
    places.settle(index, count);
    const cpu_set_t after = mask();
    EXPECT_TRUE(CPU_EQUAL(&after, &allowed)) << "a thread is not bound to where it goes";
  }).join();
}

TEST(CpuPlaces, AThreadLeavesTheCpuOfAnother) {
  const cpu_set_t all = mask();
  const std::vector<int> cpus = cpus_of(all);
  if (cpus.size() < 2) GTEST_SKIP() << "there is one CPU";
  for (const int cpu : cpus) {
    CpuPlaces places(3);
    settle(places, 0, only(cpu), only(cpu));
    ASSERT_EQ(places.noted(0), cpu);
    settle(places, 1, only(cpu), all);
    EXPECT_NE(places.noted(1), cpu);
    EXPECT_EQ(places.noted(0), cpu);
  }
}

TEST(CpuPlaces, AThreadStaysWhereItMayNotLeave) {
  const int cpu = cpus_of(mask()).front();
  CpuPlaces places(3);
  for (int thread = 0; thread < 3; ++thread) {
    settle(places, thread, only(cpu), only(cpu));
    EXPECT_EQ(places.noted(thread), cpu);
  }
}

TEST(CpuPlaces, AThreadThatRestsGivesUpItsCpu) {
  const std::vector<int> cpus = cpus_of(mask());
  if (cpus.size() < 2) GTEST_SKIP() << "there is one CPU";
  cpu_set_t both = only(cpus[0]);
  CPU_SET(cpus[1], &both);
  CpuPlaces places(3);
  settle(places, 1, only(cpus[0]), only(cpus[0]));
  settle(places, 2, only(cpus[1]), only(cpus[1]));
  settle(places, 0, only(cpus[0]), both, 2);
  EXPECT_EQ(places.noted(0), cpus[1]);
}

TEST(CpuPlaces, AThreadAloneStaysWhereItIs) {
  CpuPlaces places(3);
  EXPECT_EQ(places.noted(0), -1);
  for (const int cpu : cpus_of(mask())) {
    settle(places, 0, only(cpu), only(cpu));
    EXPECT_EQ(places.noted(0), cpu);
  }
}

}  // namespace
}  // namespace aotllm
