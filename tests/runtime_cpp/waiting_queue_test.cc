#include "aotllm/waiting_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

using Ids = std::vector<SequenceId>;

constexpr std::int64_t kFar = 1'000'000;

TEST(WaitingQueue, OrdersNewcomersByPolicy) {
  const std::map<SequenceId, std::int32_t> cached = {{1, 0}, {2, 8}, {3, 8}, {4, 16}};
  const std::vector<std::pair<QueuePolicy, Ids>> cases = {
      {QueuePolicy::kFcfs, {1, 2, 3, 4}},
      {QueuePolicy::kPriority, {3, 1, 2, 4}},
      {QueuePolicy::kLongestPrefix, {4, 2, 3, 1}},
  };
  for (const auto& [policy, order] : cases) {
    WaitingQueue queue(policy, kFar, [&](SequenceId id) { return cached.at(id); });
    for (const SequenceId id : {4, 2, 1, 3}) {
      queue.insert({.id = id, .priority = id == 3 ? 5 : 0});
    }
    EXPECT_EQ(queue.front(9), order);
    EXPECT_EQ(queue.front(2), Ids(order.begin(), order.begin() + 2));
  }
}

TEST(WaitingQueue, OverdueOnesByIdGoAheadOfPreemptedOnesByRank) {
  WaitingQueue queue(QueuePolicy::kPriority, 10);
  queue.insert({.id = 9, .priority = 9, .arrival_step = 5});
  queue.insert({.id = 7, .priority = 0, .arrival_step = 5, .preempted = true});
  queue.insert({.id = 8, .priority = 1, .arrival_step = 5, .preempted = true});
  queue.insert({.id = 6, .priority = 0, .arrival_step = 5, .overdue = true, .preempted = true});
  queue.insert({.id = 3, .priority = 0, .arrival_step = 1});
  EXPECT_EQ(queue.front(9), (Ids{6, 8, 7, 9, 3}));
  EXPECT_EQ(queue.advance(10), Ids{});
  EXPECT_EQ(queue.advance(11), Ids{3});
  EXPECT_EQ(queue.front(9), (Ids{3, 6, 8, 7, 9}));
  EXPECT_EQ(queue.advance(15), (Ids{7, 8, 9}));
  EXPECT_EQ(queue.front(9), (Ids{3, 6, 7, 8, 9}));
}

TEST(WaitingQueue, LongestPrefixFollowsTheCache) {
  std::map<SequenceId, std::int32_t> cached;
  WaitingQueue queue(QueuePolicy::kLongestPrefix, kFar, [&](SequenceId id) { return cached[id]; });
  for (SequenceId id = 1; id <= 100; ++id) {
    queue.insert({.id = id});
  }
  cached[60] = 4;
  for (int step = 0; step < 100; ++step) {
    queue.advance(step);
  }
  EXPECT_EQ(queue.front(2), (Ids{60, 1}));
  cached[60] = 0;  // evicted: the first one is always looked up
  queue.advance(100);
  EXPECT_EQ(queue.front(1), Ids{1});
}

TEST(WaitingQueue, RefusesMisuse) {
  WaitingQueue queue(QueuePolicy::kFcfs, 10);
  queue.insert({.id = 1});
  EXPECT_THROW(queue.insert({.id = 1}), Error);
  queue.erase(2);  // no-op
  EXPECT_EQ(queue.front(9), Ids{1});
  EXPECT_THROW(WaitingQueue(QueuePolicy::kFcfs, 0), Error);
  EXPECT_THROW(WaitingQueue(QueuePolicy::kLongestPrefix, 10), Error);
}

/// A sorted vector does the same.
TEST(WaitingQueueProperty, BehavesAsASortedList) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto policy = static_cast<QueuePolicy>(seed % 3);
    const auto cached = [](SequenceId id) { return static_cast<std::int32_t>(id * 7 % 5); };
    WaitingQueue queue(policy, 20, cached);
    std::vector<WaitingQueue::Entry> list;
    const auto place = [&](const WaitingQueue::Entry& e) {
      const bool by_priority = e.preempted || policy == QueuePolicy::kPriority;
      const std::int32_t merit = by_priority ? e.priority : policy == QueuePolicy::kFcfs ? 0 : cached(e.id);
      return e.overdue ? std::tuple(0, 0, e.id) : std::tuple(e.preempted ? 1 : 2, -merit, e.id);
    };
    for (std::int64_t now = 0; now < 300; ++now) {
      if (random() % 3 != 0) {
        const WaitingQueue::Entry entry = {now + 1, static_cast<std::int32_t>(random() % 3), now, random() % 9 == 0,
                                           random() % 4 == 0};
        queue.insert(entry);
        list.push_back(entry);
      }
      if (!list.empty() && random() % 3 == 0) {
        const std::size_t gone = random() % list.size();
        queue.erase(list[gone].id);
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(gone));
      }
      queue.advance(now);
      for (WaitingQueue::Entry& entry : list) {
        entry.overdue |= now - entry.arrival_step >= 20;
      }
      std::sort(list.begin(), list.end(), [&](const auto& a, const auto& b) { return place(a) < place(b); });
      Ids ids;
      for (const WaitingQueue::Entry& entry : list) {
        ids.push_back(entry.id);
        ASSERT_TRUE(queue.contains(entry.id));
      }
      ASSERT_EQ(queue.front(list.size() + 1), ids);
      ASSERT_EQ(queue.size(), ids.size());
      ASSERT_NO_THROW(queue.check_invariants());
    }
  }
}

}  // namespace
}  // namespace aotllm
