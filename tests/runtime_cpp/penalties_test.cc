#include "sampling/penalties.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "sampling_support.h"

namespace aotllm {
namespace {

using testing::kInf;
using testing::processed;

// The text of all cases: 0 is in the prompt only, 1 in both, 2 and 3 in the output only, 4 nowhere.
const std::vector<TokenId> kTokens = {0, 1, 0, /* generated: */ 2, 1, 3, 2, 2};
constexpr std::int32_t kNumPromptTokens = 3;

TEST(Penalties, LiteralTable) {
  struct Case {
    const char* what;
    double repetition, presence, frequency;
    std::vector<float> logits, expected;
  };
  const std::vector<Case> cases = {
      {"repetition divides positive logits of prompt and output", 2, 0, 0, {4, 4, 4, 4, 4}, {2, 2, 2, 2, 4}},
      {"and multiplies negative ones", 2, 0, 0, {-4, -4, -4, -4, -4}, {-8, -8, -8, -8, -4}},
      {"of any size", 2, 0, 0, {0.5, -0.5, 0.25, -0.25, 0.5}, {0.25, -1, 0.125, -0.5, 0.5}},
      {"0 stays 0", 2, 0, 0, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}},
      {"below 1 it encourages", 0.5, 0, 0, {4, -4, 4, -4, 4}, {8, -2, 8, -2, 4}},
      {"presence counts the output, once", 1, 0.5, 0, {1, 1, 1, 1, 1}, {1, 0.5, 0.5, 0.5, 1}},
      {"frequency counts how often", 1, 0, 0.5, {1, 1, 1, 1, 1}, {1, 0.5, -0.5, 0.5, 1}},
      {"negative ones encourage", 1, -1, -2, {0, 0, 0, 0, 0}, {0, 3, 7, 3, 0}},
      {"repetition first, then the others", 2, 1, 0.5, {4, 4, -4, 4, 4}, {2, 0.5, -10.5, 0.5, 4}},
      {"what is forbidden stays so",
       0.5,
       -2,
       -2,
       {-kInf, -kInf, -kInf, -kInf, -kInf},
       {-kInf, -kInf, -kInf, -kInf, -kInf}},
  };
  for (const Case& c : cases) {
    SamplingParams params;
    params.repetition_penalty = c.repetition;
    params.presence_penalty = c.presence;
    params.frequency_penalty = c.frequency;
    EXPECT_EQ(processed(params, c.logits, kTokens, kNumPromptTokens), c.expected) << c.what;
  }
}

TEST(Penalties, OfAnySizeGiveNumbers) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  SamplingParams params;
  for (const double repetition : {1e-320, 1e-300, 1e300}) {
    params.repetition_penalty = repetition;
    for (const float logit : {-kLargest, -1.0F, 0.0F, 1e-30F, kLargest}) {
      const std::vector<float> after = processed(params, {logit}, {0}, 1);
      EXPECT_TRUE(std::isfinite(after[0])) << repetition << " on " << logit;
      EXPECT_EQ(std::signbit(after[0]), std::signbit(logit)) << repetition << " on " << logit;
    }
  }
}

TEST(Penalties, LeaveFaultsToBeFound) {
  SamplingParams params;
  params.repetition_penalty = 2.0;
  params.presence_penalty = 1.0;
  const std::vector<float> after = processed(params, {std::nanf(""), kInf}, {0, 1, 0, 1}, 2);
  EXPECT_TRUE(std::isnan(after[0]));
  EXPECT_EQ(after[1], kInf);
}

}  // namespace
}  // namespace aotllm
