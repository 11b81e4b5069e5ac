#include "runner/cuda/buckets.h"

#include <gtest/gtest.h>

namespace aotllm::cuda {
namespace {

TEST(Buckets, BatchesGrowByAnEighthOrLittleMoreAndFitTheRowsOfABuffer) {
  for (int size = 1; size <= 2048; ++size) {
    const int bucket = batch_bucket(size);
    EXPECT_GE(bucket, size);
    EXPECT_LE(bucket - size, std::max(7, size / 4)) << size;
    EXPECT_EQ(batch_bucket(bucket), bucket) << size;
    EXPECT_LE(bucket, (size + 127) / 128 * 128) << size;  // kDeviceRowStep
    EXPECT_GE(mixed_rows_bucket(size), bucket);
    EXPECT_LE(mixed_rows_bucket(size), (size + 127) / 128 * 128) << size;
  }
}

TEST(Buckets, ContextsArePowersOfTwoUpToTheLimit) {
  EXPECT_EQ(context_bucket(1, 8192), 256);
  EXPECT_EQ(context_bucket(257, 8192), 512);
  EXPECT_EQ(context_bucket(5000, 6000), 6000);
  EXPECT_EQ(context_bucket(100, 128), 128);
  for (int context = 1; context <= 3000; ++context) EXPECT_GE(context_bucket(context, 3000), context);
}

}  // namespace
}  // namespace aotllm::cuda
