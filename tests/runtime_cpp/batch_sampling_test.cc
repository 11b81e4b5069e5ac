// Tokens that the runner draws.
#include <gtest/gtest.h>

#include <algorithm>

#include "batch_fixture.h"

namespace aotllm {
namespace {

using testing::Batch;
using testing::BatchOptions;
using testing::expected_output;
using testing::FakeRunner;
using testing::greedy_request;
using testing::kNanToken;
using testing::sampling_options;
using testing::small_shape;

/// Keeps what it was asked to draw, and says other tokens where the test wants it to.
class RecordingRunner final : public testing::SamplingRunner {
 public:
  using SamplingRunner::SamplingRunner;

  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override {
    SamplingRunner::step(sequences, outputs);
    for (const SequenceStep& sequence : sequences) {
      if (sequence.sampling) {
        asked.push_back(*sequence.sampling);
      }
    }
    num_rows.push_back(outputs.rows());
    if (spoil) {
      spoil(outputs.tokens);
    }
  }

  std::vector<RowSampling> asked;
  std::vector<std::int32_t> num_rows;  ///< of logits, by step
  std::function<void(std::vector<TokenId>&)> spoil;
};

BatchOptions recording_options() {
  BatchOptions options;
  options.make_runner = [](const ModelShape& shape, FakeRunner::Hook hook) {
    return std::make_unique<RecordingRunner>(shape, std::move(hook));
  };
  return options;
}

RecordingRunner& recorder(const Batch& batch) {
  return static_cast<RecordingRunner&>(*batch.runner);
}

Request drawn_request(std::vector<TokenId> prompt, std::int32_t max_tokens) {
  Request request = greedy_request(std::move(prompt), max_tokens);
  request.sampling.temperature = 0.7;
  request.sampling.top_k = 5;
  request.sampling.top_p = 0.9;
  request.sampling.min_p = 0.01;
  request.sampling.seed = 11;
  return request;
}

TEST(BatchSampling, ARowHasItsParametersAndItsPlaceInTheText) {
  Batch batch({}, recording_options());
  Request request = drawn_request({4, 5, 6}, 2);
  request.n = 2;
  batch.add(request);
  batch.run_to_end();
  const std::vector<RowSampling>& asked = recorder(batch).asked;
  ASSERT_EQ(asked.size(), 4U);
  for (std::size_t i = 0; i < asked.size(); ++i) {
    EXPECT_EQ(asked[i].temperature, 0.7F);
    EXPECT_EQ(asked[i].top_k, 5);
    EXPECT_EQ(asked[i].top_p, 0.9F);
    EXPECT_EQ(asked[i].min_p, 0.01F);
    EXPECT_EQ(asked[i].seed, 11U);
    EXPECT_EQ(asked[i].mask, -1);
    EXPECT_LT(asked[i].sequence_index, 2U);
    EXPECT_TRUE(asked[i].position == 3 || asked[i].position == 4);
  }
  for (std::uint32_t index : {0, 1}) {
    EXPECT_EQ((batch.tokens_of[{1, static_cast<std::int32_t>(index)}]),
              expected_output(request, small_shape(), 48, {}, index).tokens);
  }
}

TEST(BatchSampling, WhatIsOnStaysOnInSinglePrecision) {
  Batch batch({}, recording_options());
  Request request = drawn_request({4, 5, 6}, 1);
  request.sampling.temperature = 1e-60;
  request.sampling.top_p = 1.0 - 1e-12;
  batch.add(request);
  batch.run_to_end();
  EXPECT_GT(recorder(batch).asked.at(0).temperature, 0.0F);
  EXPECT_LT(recorder(batch).asked.at(0).top_p, 1.0F);
}

/// What only the host can do where the runner can do no more than draw, one at a time.
TEST(BatchSampling, WhoNeedsLogitsGetsThem) {
  const std::vector<std::function<void(Request&)>> needs = {
      [](Request& request) { request.logprobs = 2; },
      [](Request& request) { request.return_logits = true; },
      [](Request& request) { request.sampling.typical_p = 0.9; },
      [](Request& request) { request.sampling.repetition_penalty = 1.5; },
      [](Request& request) { request.sampling.logit_bias = {{5, 1.0}}; },
      [](Request& request) { request.sampling.bad_words = {{7}}; },
  };
  for (const auto& need : needs) {
    Batch batch({}, recording_options());
    const Request plain = drawn_request({4, 5, 6}, 6);
    Request special = drawn_request({4, 5, 7}, 6);
    need(special);
    batch.add(plain);
    batch.add(special);
    batch.add(plain);
    batch.run_to_end();
    EXPECT_EQ(recorder(batch).asked.size(), 12U);
    EXPECT_EQ(recorder(batch).num_rows, std::vector<std::int32_t>(6, 1));
    EXPECT_EQ(batch.tokens[1], expected_output(plain, small_shape(), 48, {}).tokens);
    EXPECT_EQ(batch.tokens[2], expected_output(special, small_shape(), 48, {}).tokens);
    EXPECT_EQ(batch.tokens[3], batch.tokens[1]);
  }
}

TEST(BatchSampling, AScoredPromptNeedsLogitsOnlyUntilItIsScored) {
  Batch batch({}, recording_options());
  Request request = drawn_request({4, 5, 6}, 4);
  request.prompt_logprobs = 1;
  batch.add(request);
  batch.run_to_end();
  EXPECT_EQ(recorder(batch).num_rows, (std::vector<std::int32_t>{3, 0, 0, 0}));
  EXPECT_EQ(batch.tokens[1], expected_output(request, small_shape(), 48, {}).tokens);
  EXPECT_EQ(batch.prompt_logprobs[1].size(), 2U);
}

TEST(BatchSampling, TokensThatNeedNoRowsArePlannedAhead) {
  Batch batch({}, sampling_options());
  batch.add(greedy_request({4}, 20));
  batch.add(drawn_request({5}, 20));
  batch.run_to_end();
  EXPECT_EQ(batch.batcher.stats().steps, 20);
  EXPECT_EQ(batch.batcher.stats().steps_planned_ahead, 19);
  EXPECT_EQ(batch.batcher.stats().generated_tokens, 40);
}

TEST(BatchSampling, NoTokenEndsItsRequestOnly) {
  Batch batch({}, sampling_options());
  const Request healthy = greedy_request({4, 5}, 6);
  const RequestId before = batch.add(healthy);
  const RequestId poisoned = batch.add(greedy_request({kNanToken, 5}, 6));
  const RequestId after = batch.add(healthy);
  batch.run_to_end();
  EXPECT_EQ(batch.last[poisoned].finish_reason, FinishReason::kError);
  EXPECT_EQ(batch.last[poisoned].error_kind, ErrorKind::kInternal);
  EXPECT_NE(batch.last[poisoned].error_message.find("NaN"), std::string::npos);
  EXPECT_TRUE(batch.tokens[poisoned].empty());
  const std::vector<TokenId> expected = expected_output(healthy, small_shape(), 48, {}).tokens;
  EXPECT_EQ(batch.tokens[before], expected);
  EXPECT_EQ(batch.tokens[after], expected);
}

TEST(BatchSampling, ATokenThatDoesNotExistEndsItsRequestOnly) {
  Batch batch({}, recording_options());
  recorder(batch).spoil = [](std::vector<TokenId>& tokens) { tokens.front() = 37; };
  const RequestId spoilt = batch.add(greedy_request({4, 5}, 3));
  const RequestId healthy = batch.add(greedy_request({6, 5}, 1));
  batch.run_to_end();
  EXPECT_EQ(batch.last[spoilt].error_message, "sampling failed: the runner drew token 37 of 37");
  EXPECT_EQ(batch.last[healthy].finish_reason, FinishReason::kLength);
}

TEST(BatchSampling, TooFewTokensFailTheStep) {
  Batch batch({}, recording_options());
  recorder(batch).spoil = [](std::vector<TokenId>& tokens) { tokens.pop_back(); };
  const RequestId id = batch.add(greedy_request({4, 5}, 3));
  batch.run_to_end();
  EXPECT_EQ(batch.last[id].error_message, "the step returned 0 tokens for 1 rows of 1");
  EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
}

}  // namespace
}  // namespace aotllm
