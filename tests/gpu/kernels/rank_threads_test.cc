#include "runner/cuda/rank_threads.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "aotllm/errors.h"
#include "comm/rendezvous.h"

namespace aotllm::cuda {
namespace {

TEST(RankThreads, EveryRankWorksOnceInEachRun) {
  RankThreads threads(4);
  std::array<int, 4> counts{};
  Rendezvous rendezvous(4);
  for (int i = 0; i < 1000; ++i) {
    threads.run([&](int rank) {
      rendezvous.meet();  // all at the same time
      ++counts[static_cast<std::size_t>(rank)];
    });
  }
  for (const int count : counts) EXPECT_EQ(count, 1000);
}

TEST(RankThreads, TheFirstFailureComesOutAndNobodyWaits) {
  for (int culprit = 0; culprit < 3; ++culprit) {
    RankThreads threads(3);
    Rendezvous rendezvous(3);
    std::string what;
    try {
      threads.run(
          [&](int rank) {
            if (rank == culprit) throw Error(ErrorKind::kInternal, "the cause");
            rendezvous.meet();
          },
          [&] { rendezvous.abort(); });
    } catch (const Error& error) {
      what = error.what();
    }
    EXPECT_EQ(what, "the cause");
    EXPECT_NO_THROW(threads.run([](int) {}));
    EXPECT_THROW(rendezvous.meet(), Error);
  }
}

TEST(RankThreads, OneRankNeedsNoThread) {
  RankThreads threads(1);
  int count = 0;
  threads.run([&](int rank) { count += 1 + rank; });
  EXPECT_EQ(count, 1);
}

}  // namespace
}  // namespace aotllm::cuda
