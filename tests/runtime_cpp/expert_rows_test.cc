#include "runner/expert_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace aotllm {
namespace {

struct Choice {
  std::vector<std::int32_t> experts;
  std::vector<float> weights;
};

Choice choose(const std::vector<float>& logits, int top_k, bool normalize) {
  Choice choice{std::vector<std::int32_t>(top_k, -1), std::vector<float>(top_k, -1.0f)};
  choose_experts(logits, top_k, normalize, choice.experts.data(), choice.weights.data());
  return choice;
}

using Ids = std::vector<std::int32_t>;

TEST(ChooseExperts, TakesTheLargestLogitsInAscendingOrderOfExperts) {
  EXPECT_EQ(choose({0.1f, 3.0f, -2.0f, 4.0f, 2.0f}, 1, true).experts, (Ids{3}));
  EXPECT_EQ(choose({0.1f, 3.0f, -2.0f, 4.0f, 2.0f}, 3, true).experts, (Ids{1, 3, 4}));
  EXPECT_EQ(choose({0.1f, 3.0f, -2.0f, 4.0f, 2.0f}, 5, true).experts, (Ids{0, 1, 2, 3, 4}));
}

TEST(ChooseExperts, OfEqualLogitsTheLowerExpertWins) {
  EXPECT_EQ(choose({1.0f, 2.0f, 1.0f, 2.0f, 2.0f}, 2, true).experts, (Ids{1, 3}));
  EXPECT_EQ(choose({1.0f, 2.0f, 1.0f, 2.0f, 2.0f}, 4, true).experts, (Ids{0, 1, 3, 4}));
  EXPECT_EQ(choose({0.0f, -0.0f, 0.0f}, 1, true).experts, (Ids{0}));
}

TEST(ChooseExperts, WeightsAreASoftmaxOverAllExpertsOrOverTheChosen) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (const int num_experts : {1, 2, 7, 128}) {
    for (const int top_k : {1, 2, 7, 128}) {
      if (top_k > num_experts) continue;
      std::vector<float> logits(num_experts);
      for (float& v : logits) v = normal(random) + 500.0f;  // e^500 is no float
      std::vector<int> order(num_experts);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
      std::vector<std::int32_t> expected(order.begin(), order.begin() + top_k);
      std::sort(expected.begin(), expected.end());
      double all = 0;
      double chosen = 0;
      for (int i = 0; i < num_experts; ++i) {
        const double odds = std::exp(double{logits[order[i]]} - double{logits[order[0]]});
        all += odds;
        if (i < top_k) chosen += odds;
      }
      for (const bool normalize : {false, true}) {
        const Choice choice = choose(logits, top_k, normalize);
        ASSERT_EQ(choice.experts, expected) << num_experts << " experts, " << top_k;
        for (int i = 0; i < top_k; ++i) {
          const double odds = std::exp(double{logits[expected[i]]} - double{logits[order[0]]});
          EXPECT_NEAR(choice.weights[i], odds / (normalize ? chosen : all), 1e-6);
        }
      }
    }
  }
}

TEST(ChooseExperts, WhateverTheLogitsTheExpertsExistAndAreDistinct) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> cases = {{nan, nan, nan, nan},
                                                 {nan, 1.0f, nan, 2.0f},
                                                 {1.0f, nan, 3.0f, nan},
                                                 {inf, -inf, inf, inf},
                                                 {-inf, -inf, -inf, -inf}};
  for (const std::vector<float>& logits : cases) {
    for (int top_k = 1; top_k <= 4; ++top_k) {
      const Choice choice = choose(logits, top_k, true);
      const std::set<std::int32_t> distinct(choice.experts.begin(), choice.experts.end());
      EXPECT_EQ(distinct.size(), static_cast<std::size_t>(top_k));
      EXPECT_GE(*distinct.begin(), 0);
      EXPECT_LT(*distinct.rbegin(), 4);
    }
  }
}

TEST(GroupByExpert, SlotsAreInOrderOfExpertsThenOfRows) {
  std::mt19937 random(5);
  for (const int rows : {1, 2, 33}) {
    for (const int num_experts : {1, 3, 40}) {
      for (const int top_k : {1, 3}) {
        if (top_k > num_experts) continue;
        std::vector<std::int32_t> experts;
        std::vector<float> weights;
        for (int row = 0; row < rows; ++row) {
          std::vector<std::int32_t> ids(num_experts);
          std::iota(ids.begin(), ids.end(), 0);
          std::shuffle(ids.begin(), ids.end(), random);
          std::sort(ids.begin(), ids.begin() + top_k);
          experts.insert(experts.end(), ids.begin(), ids.begin() + top_k);
          for (int i = 0; i < top_k; ++i) weights.push_back(static_cast<float>(row * num_experts + ids[i]));
        }
        std::vector<std::int32_t> first(num_experts + 1, -1);
        std::vector<std::int32_t> row_of(experts.size(), -1);
        std::vector<float> weight_of(experts.size(), -1.0f);
        const ExpertRows grouped{first.data(), row_of.data(), weight_of.data()};
        group_by_expert(experts.data(), weights.data(), rows, top_k, num_experts, grouped);

        EXPECT_EQ(first.front(), 0);
        EXPECT_EQ(first.back(), std::ssize(experts));
        for (int e = 0; e < num_experts; ++e) {
          EXPECT_EQ(grouped.rows_of(e), std::count(experts.begin(), experts.end(), e));
          for (int slot = first[e]; slot < first[e + 1]; ++slot) {
            EXPECT_EQ(weight_of[slot], row_of[slot] * num_experts + e) << "the weight of this row and expert";
            if (slot > first[e]) {
              EXPECT_GT(row_of[slot], row_of[slot - 1]);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace aotllm
