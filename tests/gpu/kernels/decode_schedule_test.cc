#include "attention/decode_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "attention/attention.h"
#include "reference.h"

namespace aotllm::cuda {
namespace {

TEST(DecodeSchedule, SplitTokensAreMultiplesThatCoverTheContext) {
  for (int queries : {1, 3, 64, 256, 5000}) {
    for (int context : {1, 200, 4096, 131072}) {
      for (int tokens_per_block : {16, 128}) {
        const int split = decode_split_tokens(queries, 8, context, tokens_per_block);
        EXPECT_GT(split, 0);
        EXPECT_EQ(split % 64, 0);
        EXPECT_EQ(split % tokens_per_block, 0);
        EXPECT_LT(split, context + 128);
      }
    }
  }
  EXPECT_EQ(decode_split_tokens(1, 8, 200, 64), 64);
  EXPECT_EQ(decode_split_tokens(4, 8, 256, 64), 64);
  EXPECT_EQ(decode_split_tokens(8, 8, 256, 64), 128);
  EXPECT_EQ(decode_split_tokens(16, 8, 256, 64), 128);
  EXPECT_EQ(decode_split_tokens(64, 8, 256, 64), 256);
  EXPECT_GE(decode_split_tokens(256, 8, 256, 64), 256);
  EXPECT_LT(decode_workspace_bytes(256, 32, 128, 131072, decode_split_tokens(256, 8, 131072, 64)),
            std::size_t{64} << 20);
}

TEST(DecodeSchedule, SharesHoldEachItemOnceInOrder) {
  auto& random = random_engine();
  for (int repetition = 0; repetition < 300; ++repetition) {
    DecodePlan plan;
    plan.num_queries = 1 + static_cast<int>(random() % 40);
    plan.head_tiles = 1 + static_cast<int>(random() % 9);
    plan.split_tokens = 64 * (1 + static_cast<int>(random() % 8));
    plan.tile_shift = 6 + static_cast<int>(random() % 2);
    plan.window = random() % 2 == 0 ? 0 : 1 + static_cast<int>(random() % 700);
    plan.derive();
    std::vector<DecodeQuery> queries(static_cast<std::size_t>(plan.num_queries));
    std::vector<long long> starts = {0};
    std::vector<std::array<int, 3>> want, got;
    for (int i = 0; i < plan.num_queries; ++i) {
      queries[i].context = random() % 4 == 0 ? 0 : 1 + static_cast<int>(random() % 2000);
      const DecodeRanges ranges = decode_ranges(plan, queries[i].context);
      starts.push_back(starts.back() + static_cast<long long>(ranges.weight) * plan.head_tiles);
      for (int tile = 0; tile < plan.head_tiles; ++tile) {
        for (int range = 0; range < ranges.count; ++range) want.push_back({i, tile, range});
      }
    }
    const int blocks = 1 + static_cast<int>(random() % 300);
    for (int block = 0; block < blocks; ++block) {
      const DecodeShare share = decode_share(starts.back(), block, blocks);
      if (share.begin >= share.end) continue;
      const auto after = std::upper_bound(starts.begin(), starts.end(), share.begin);
      const int query = static_cast<int>(after - starts.begin()) - 1;
      DecodeCursor cursor;
      cursor.seek(plan, query, queries[query], starts[query], share.begin);
      while (cursor.settle(plan, queries.data()) && cursor.start < share.end) {
        got.push_back({cursor.query, cursor.head_tile, cursor.range});
        cursor.advance(plan);
      }
    }
    ASSERT_EQ(got, want);
  }
}

TEST(DecodeSchedule, RangeOfIsADivision) {
  for (int units = 1; units < 2200; units += units < 300 ? 1 : 37) {
    DecodePlan plan;
    plan.split_tokens = 64 * units;
    plan.derive();
    for (int position = 0; position < kDecodeMaxContext; position += 509) {
      ASSERT_EQ(range_of(plan, position), position / plan.split_tokens) << plan.split_tokens;
    }
  }
}

}  // namespace
}  // namespace aotllm::cuda
