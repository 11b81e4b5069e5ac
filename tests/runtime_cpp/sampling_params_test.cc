#include "aotllm/sampling_params.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

TEST(SamplingParams, NamesTheFieldThatIsOutOfRange) {
  struct Case {
    const char* param;
    void (*set)(SamplingParams&);
  };
  const std::vector<Case> cases = {
      {"max_tokens", [](SamplingParams& p) { p.max_tokens = 0; }},
      {"max_tokens", [](SamplingParams& p) { p.max_tokens = -1; }},
      {"temperature", [](SamplingParams& p) { p.temperature = -0.1; }},
      {"temperature", [](SamplingParams& p) { p.temperature = 100.1; }},
      {"temperature", [](SamplingParams& p) { p.temperature = std::nan(""); }},
      {"temperature", [](SamplingParams& p) { p.temperature = HUGE_VAL; }},
      {"top_k", [](SamplingParams& p) { p.top_k = -2; }},
      {"top_p", [](SamplingParams& p) { p.top_p = 0.0; }},
      {"top_p", [](SamplingParams& p) { p.top_p = 1.1; }},
      {"top_p", [](SamplingParams& p) { p.top_p = std::nan(""); }},
      {"min_p", [](SamplingParams& p) { p.min_p = -0.1; }},
      {"min_p", [](SamplingParams& p) { p.min_p = 1.1; }},
      {"min_p", [](SamplingParams& p) { p.min_p = std::nan(""); }},
      {"typical_p", [](SamplingParams& p) { p.typical_p = 0.0; }},
      {"typical_p", [](SamplingParams& p) { p.typical_p = 1.1; }},
      {"typical_p", [](SamplingParams& p) { p.typical_p = std::nan(""); }},
      {"repetition_penalty", [](SamplingParams& p) { p.repetition_penalty = 0.0; }},
      {"repetition_penalty", [](SamplingParams& p) { p.repetition_penalty = -1.0; }},
      {"repetition_penalty", [](SamplingParams& p) { p.repetition_penalty = std::nan(""); }},
      {"repetition_penalty", [](SamplingParams& p) { p.repetition_penalty = HUGE_VAL; }},
      {"presence_penalty", [](SamplingParams& p) { p.presence_penalty = 2.1; }},
      {"presence_penalty", [](SamplingParams& p) { p.presence_penalty = std::nan(""); }},
      {"frequency_penalty", [](SamplingParams& p) { p.frequency_penalty = -2.1; }},
      {"frequency_penalty", [](SamplingParams& p) { p.frequency_penalty = std::nan(""); }},
      {"no_repeat_ngram_size", [](SamplingParams& p) { p.no_repeat_ngram_size = -1; }},
      {"logit_bias", [](SamplingParams& p) { p.logit_bias = {{10, 1.0}}; }},
      {"logit_bias", [](SamplingParams& p) { p.logit_bias = {{-1, 1.0}}; }},
      {"logit_bias", [](SamplingParams& p) { p.logit_bias = {{1, 0.0}, {2, -100.5}}; }},
      {"logit_bias", [](SamplingParams& p) { p.logit_bias = {{1, std::nan("")}}; }},
      {"allowed_token_ids", [](SamplingParams& p) { p.allowed_token_ids = {3, 10}; }},
      {"bad_words", [](SamplingParams& p) { p.bad_words = {{1}, {}}; }},
      {"bad_words", [](SamplingParams& p) { p.bad_words = {{1, 10}}; }},
      {"min_tokens", [](SamplingParams& p) { p.min_tokens = -1; }},
      {"min_tokens", [](SamplingParams& p) { p.min_tokens = p.max_tokens + 1; }},
      {"stop_token_ids", [](SamplingParams& p) { p.stop_token_ids = {3, 10}; }},
      {"stop_token_ids", [](SamplingParams& p) { p.stop_token_ids = {-1}; }},
  };
  for (const Case& c : cases) {
    SamplingParams params;
    c.set(params);
    try {
      validate(params, 10);
      ADD_FAILURE() << c.param;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidRequest);
      EXPECT_EQ(e.param(), c.param);
      EXPECT_EQ(std::string(e.what()).rfind(c.param, 0), 0U) << e.what();
    }
  }
}

TEST(SamplingParams, TakesTheEndsOfTheRanges) {
  SamplingParams params;
  validate(params, 10);
  params.max_tokens = 1;
  params.temperature = 100.0;
  params.top_k = -1;
  params.top_p = 1.0;
  params.min_p = 1.0;
  params.typical_p = 1.0;
  params.repetition_penalty = 1e-300;
  params.presence_penalty = 2.0;
  params.frequency_penalty = -2.0;
  params.no_repeat_ngram_size = 1;
  params.logit_bias = {{0, -100.0}, {9, 100.0}};
  params.allowed_token_ids = {0, 9};
  params.bad_words = {{0}, {9, 9}};
  params.min_tokens = 1;
  params.stop_token_ids = {0, 9};
  validate(params, 10);
  params.repetition_penalty = 1e300;
  params.no_repeat_ngram_size = std::numeric_limits<std::int32_t>::max();
  params.temperature = 0.0;
  params.min_p = 0.0;
  params.top_k = std::numeric_limits<std::int32_t>::max();
  validate(params, 10);
}

}  // namespace
}  // namespace aotllm
