#include <gtest/gtest.h>

#include <vector>

#include "engine/plan.h"

namespace aotllm {
namespace {

TEST(KvGroups, FullAttentionFirstThenWindowsFromTheLargest) {
  const struct {
    const char* what;
    std::vector<int> layer_windows;
    std::vector<int> group_windows;
    std::vector<int> group_of_layer;
  } cases[] = {
      {"full attention only", {0, 0}, {0}, {0, 0}},
      {"one window everywhere", {512, 512}, {512}, {0, 0}},
      {"full and a window", {512, 0, 512}, {0, 512}, {1, 0, 1}},
      {"windows only", {64, 512, 64}, {512, 64}, {1, 0, 1}},
      {"a window as long as a sequence is none", {1000, 0, 2000, 999}, {0, 999}, {0, 0, 0, 1}},
      {"the smallest windows share the last group", {1, 0, 5, 4, 3, 2}, {0, 5, 4, 3}, {3, 0, 1, 2, 3, 3}},
      {"five windows", {1, 2, 3, 4, 5}, {5, 4, 3, 2}, {3, 3, 2, 1, 0}},
  };
  for (const auto& c : cases) {
    KvPlan kv;
    for (const int window : c.layer_windows) kv.layers.push_back({.num_kv_heads = 1, .head_dim = 8, .window = window});
    assign_kv_groups(kv, 1000);
    std::vector<int> windows;
    std::vector<int> group_of_layer(c.layer_windows.size(), -1);
    for (int group = 0; group < std::ssize(kv.groups); ++group) {
      windows.push_back(kv.groups[group].window);
      for (const int layer : kv.groups[group].layers) group_of_layer[layer] = group;
    }
    EXPECT_EQ(windows, c.group_windows) << c.what;
    EXPECT_EQ(group_of_layer, c.group_of_layer) << c.what;
    for (std::size_t layer = 0; layer < kv.layers.size(); ++layer) {
      EXPECT_EQ(kv.layers[layer].group, c.group_of_layer[layer]) << c.what;
      EXPECT_EQ(kv.layers[layer].window, c.layer_windows[layer]) << c.what << ": what kernels see stays";
    }
  }
}

}  // namespace
}  // namespace aotllm
