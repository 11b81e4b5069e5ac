#include "runner/cuda/tactic_table.h"

#include <gtest/gtest.h>

#include "aotllm/errors.h"

namespace aotllm::cuda {
namespace {

Linear linear(MatrixFormat format, int n, int k) {
  Linear linear;
  linear.n = n;
  linear.k = k;
  linear.matrix.format = format;
  linear.tactics = {{512, "plan's"}};
  return linear;
}

TEST(TacticTable, MeasuredTacticsGoBeforeThePlansForTheirFormatAndShapeOnly) {
  const TacticTable table = TacticTable::parse(R"({"version": 1, "linears": [{"format": "fp8", "n": 64, "k": 32,
    "tactics": [{"max_rows": 8, "kernel": "skinny.8", "seconds": 1e-5},
                {"max_rows": 64, "kernel": "tile.2", "seconds": 2e-5}]}]})");
  const auto& tuned = table.find(linear(MatrixFormat::kFp8, 64, 32));
  ASSERT_EQ(tuned.size(), 2u);
  EXPECT_EQ(tuned[1].max_rows, 64);
  EXPECT_EQ(tuned[1].kernel, "tile.2");
  for (const Linear& other : {linear(MatrixFormat::kBf16, 64, 32), linear(MatrixFormat::kFp8, 32, 64)}) {
    EXPECT_EQ(table.find(other).front().kernel, "plan's");
  }
}

TEST(TacticTable, NoTextIsNoTable) {
  EXPECT_TRUE(TacticTable::parse("").entries().empty());
}

TEST(TacticTable, DamagedTextIsRefused) {
  for (const char* text : {"{", "[]", R"({"version": 2, "linears": []})", R"({"version": 1})",
                           R"({"version": 1, "linears": [{"format": "fp9", "n": 1, "k": 1, "tactics": []}]})",
                           R"({"version": 1, "linears": [{"format": "fp8", "n": 0, "k": 1, "tactics": []}]})",
                           R"({"version": 1, "linears": [{"format": "fp8", "n": 1, "k": 1, "tactics":
                              [{"max_rows": 8, "kernel": "a", "seconds": 0}, {"max_rows": 8, "kernel": "b", "seconds": 0}]}]})"}) {
    EXPECT_THROW(TacticTable::parse(text), Error) << text;
  }
}

}  // namespace
}  // namespace aotllm::cuda
