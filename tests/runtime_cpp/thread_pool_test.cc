#include "aotllm/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, testing::Values(1, 2, 3, 8));

TEST_P(ThreadPoolTest, RunsEachIndexOnce) {
  ThreadPool pool(GetParam());
  std::vector<int> calls(GetParam(), 0);
  pool.parallel([&](int index, int count) {
    EXPECT_EQ(count, GetParam());
    ++calls[index];
  });
  EXPECT_EQ(calls, std::vector<int>(GetParam(), 1));
}

TEST_P(ThreadPoolTest, ManyRegionsSumWhatTheirThreadsWrote) {
  ThreadPool pool(GetParam());
  std::vector<std::int64_t> parts(GetParam());
  std::int64_t total = 0;
  for (int region = 0; region < 500; ++region) {
    pool.parallel([&](int index, int) { parts[index] = region + index; });
    total += std::accumulate(parts.begin(), parts.end(), std::int64_t{0});
  }
  const std::int64_t n = GetParam();
  EXPECT_EQ(total, n * 500 * 499 / 2 + 500 * n * (n - 1) / 2);
}

TEST_P(ThreadPoolTest, BarrierMakesWritesVisible) {
  ThreadPool pool(GetParam());
  std::vector<int> values(GetParam(), 0);
  std::atomic<int> mismatches{0};
  pool.parallel([&](int index, int count) {
    for (int round = 1; round <= 200; ++round) {
      values[index] = round;
      pool.barrier();
      if (values[(index + 1) % count] != round) ++mismatches;
      pool.barrier();
    }
  });
  EXPECT_EQ(mismatches, 0);
}

TEST_P(ThreadPoolTest, ExceptionPropagatesAndReleasesTheOthers) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 24; ++round) {
    const int thrower = round % GetParam();
    const auto region = [&](int index, int) {
      pool.barrier();
      if (index == thrower) throw std::runtime_error("tile 7");
      pool.barrier();  // the thrower never comes
    };
    try {
      pool.parallel(region);
      FAIL() << "the exception was lost";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "tile 7");
    }
    int calls = 0;
    pool.parallel([&](int index, int) {
      pool.barrier();
      if (index == 0) ++calls;
    });
    EXPECT_EQ(calls, 1) << "the pool works on after an exception";
  }
}

TEST_P(ThreadPoolTest, TeamsHaveBarriersOfTheirOwn) {
  for (int num_teams = 1; num_teams <= GetParam(); ++num_teams) {
    ThreadPool pool(GetParam(), num_teams);
    std::vector<int> values(GetParam(), 0);
    std::vector<int> sizes(num_teams, 0);
    std::atomic<int> mismatches{0};
    for (int thread = 0; thread < GetParam(); ++thread) sizes[pool.member(thread).team] = pool.member(thread).count;
    EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), 0), GetParam());
    pool.parallel([&](int thread, int count) {
      const ThreadPool::Member place = pool.member(thread);
      const int first = thread - place.index;
      for (int round = 1; round <= 100; ++round) {
        // Teams do as many rounds of their own as they have number, so that they are apart where they meet.
        for (int own = 0; own <= place.team; ++own) {
          values[thread] = 10 * round + own;
          pool.barrier(place.team);
          if (values[first + (place.index + 1) % place.count] != 10 * round + own) ++mismatches;
          pool.barrier(place.team);
        }
        values[thread] = -round;
        pool.barrier();
        if (values[(thread + 1) % count] != -round) ++mismatches;
        pool.barrier();
      }
    });
    EXPECT_EQ(mismatches, 0) << num_teams << " teams";
    const auto failing = [&](int thread, int count) {
      if (thread == count - 1) throw std::runtime_error("tile 7");
      pool.barrier(pool.member(thread).team);
      pool.barrier();  // the thrower never comes
    };
    EXPECT_THROW(pool.parallel(failing), std::runtime_error);
  }
}

TEST_P(ThreadPoolTest, RegionsHaveAsManyThreadsAsItWasResizedTo) {
  for (int num_teams = 1; num_teams <= std::min(GetParam(), 2); ++num_teams) {
    ThreadPool pool(GetParam(), num_teams);
    for (int round = 0; round < 300; ++round) {
      const int expected = num_teams + round * 7 % (GetParam() - num_teams + 1);
      pool.resize(expected);
      std::vector<int> calls(GetParam(), 0);
      int places = 0;
      pool.parallel([&](int thread, int count) {
        EXPECT_EQ(count, expected);
        ++calls[thread];
        pool.barrier(pool.member(thread).team);
        pool.barrier();
        if (thread == 0) places = static_cast<int>(std::ranges::count(calls, 1));
      });
      EXPECT_EQ(places, expected) << "all had come to the barrier, and no one else";
      EXPECT_EQ(std::accumulate(calls.begin(), calls.end(), 0), expected);
      EXPECT_EQ(std::accumulate(calls.begin(), calls.begin() + expected, 0), expected) << "the first ones";
    }
    EXPECT_EQ(pool.capacity(), GetParam());
    EXPECT_THROW(pool.resize(GetParam() + 1), Error);
    EXPECT_THROW(pool.resize(num_teams - 1), Error);
  }
}

TEST_P(ThreadPoolTest, DealsOutEachNumberOnceBetweenBarriers) {
  for (int num_teams = 1; num_teams <= std::min(GetParam(), 2); ++num_teams) {
    ThreadPool pool(GetParam(), num_teams);
    constexpr std::uint32_t kItems = 50;
    constexpr int kRounds = 100;
    std::vector<std::vector<int>> owners(num_teams, std::vector<int>(kItems * kRounds, 0));
    pool.parallel([&](int thread, int) {
      const int team = pool.member(thread).team;
      for (std::uint32_t round = 0; round < kRounds; ++round) {
        for (std::uint32_t item = pool.next(team); item < kItems; item = pool.next(team)) {
          ++owners[team][round * kItems + item];  // a race, were an item dealt out twice
        }
        round % 3 == 2 ? pool.barrier() : pool.barrier(team);
      }
    });
    for (const auto& counts : owners) EXPECT_EQ(counts, std::vector<int>(kItems * kRounds, 1));
  }
}

TEST_P(ThreadPoolTest, ParkedThreadsAreWoken) {
  ThreadPool pool(GetParam());
  std::atomic<int> mismatches{0};
  std::vector<int> values(GetParam(), 0);
  for (int region = 0; region < 20; ++region) {
    // Each thread is late in turn, by more than others spin, so that they have parked: at the barrier, for the end of
    // the region, or before its begin.
    const auto late = [&] {
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
      while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
    };
    pool.parallel([&](int index, int count) {
      if (region % count == index) late();
      values[index] = region;
      pool.barrier();
      if (values[(index + 1) % count] != region) ++mismatches;
      pool.barrier();
      if (region % count == index) late();
    });
    late();
  }
  EXPECT_EQ(mismatches, 0);
}

TEST_P(ThreadPoolTest, AllThreadsMayThrow) {
  ThreadPool pool(GetParam());
  EXPECT_THROW(pool.parallel([](int, int) { throw std::logic_error("all"); }), std::logic_error);
}

/// Threads of this process that run or want to (state R of proc(5)), the calling one included.
int runnable_threads() {
  int runnable = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "stat");
    const std::string stat((std::istreambuf_iterator<char>(file)), {});
    const auto name_end = stat.rfind(')');
    if (name_end != std::string::npos && stat.substr(name_end + 2, 1) == "R") ++runnable;
  }
  return runnable;
}

TEST(ThreadPool, IdleThreadsPark) {
  ThreadPool pool(2);
  pool.parallel([](int, int) {});
  for (int poll = 0; runnable_threads() > 1; ++poll) {
    ASSERT_LT(poll, 100'000) << "a worker spins on without work";
    std::this_thread::yield();
  }
}

TEST(ThreadPool, RefusesLessThanOneThread) {
  EXPECT_THROW(ThreadPool(0), Error);
  EXPECT_THROW(ThreadPool(-3), Error);
  EXPECT_THROW(ThreadPool(2, 3), Error);
  EXPECT_THROW(ThreadPool(2, 0), Error);
}

}  // namespace
}  // namespace aotllm
