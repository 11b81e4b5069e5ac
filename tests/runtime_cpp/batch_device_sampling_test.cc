// Masks, penalties and log-probabilities of runners that can do them.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "aotllm/errors.h"
#include "batch_fixture.h"
#include "manager/background.h"

namespace aotllm {
namespace {

using testing::Batch;
using testing::BatchOptions;
using testing::expected_output;
using testing::greedy_request;
using testing::MockProposer;
using testing::sampling_options;
using testing::SamplingRunner;
using testing::small_shape;

constexpr SamplingSupport kAll{.masks = true, .count_slots = 8, .max_logprobs = 20};

/// Allows a third of the tokens, which third depends on the tokens before.
class ThirdConstraint final : public Constraint {
 public:
  void fill_mask(std::span<std::uint32_t> mask) override {
    std::ranges::fill(mask, 0U);
    for (std::int32_t token = sum_ % 3; token < small_shape().vocab_size; token += 3) {
      mask[static_cast<std::size_t>(token / 32)] |= 1U << (token % 32);
    }
  }
  void accept(TokenId token) override { sum_ += token; }
  std::vector<TokenId> take_forced(std::int32_t limit) override {
    if (sum_ % 5 != 0 || limit < 2) {
      return {};
    }
    const TokenId token = sum_ % 3;
    sum_ += token + 1;
    return {token};
  }
  bool finished() const override { return false; }
  std::unique_ptr<Constraint> clone() const override { return std::make_unique<ThirdConstraint>(*this); }

 private:
  std::int32_t sum_ = 1;
};

/// A request with any of what a runner may be able to do, and sometimes with what it cannot.
class RandomRequests {
 public:
  explicit RandomRequests(unsigned seed) : random_(seed) {}

  Request next() {
    std::vector<TokenId> prompt(static_cast<std::size_t>(1 + below(14)));
    for (TokenId& token : prompt) {
      token = 4 + below(3);
    }
    Request request = greedy_request(std::move(prompt), 1 + below(25));
    SamplingParams& params = request.sampling;
    if (below(3) > 0) {
      params.temperature = 0.25 * (1 + below(6));
      params.seed = below(1000);
      params.top_k = below(2) * below(30);
      params.top_p = below(2) == 0 ? 1.0 : 0.75;
      params.min_p = 0.03125 * below(2);
    }
    if (below(2) == 0) {
      params.repetition_penalty = 0.5 + 0.375 * below(4);
      params.presence_penalty = 0.3 * (below(5) - 2);
      params.frequency_penalty = 0.1 * (below(5) - 2);
    }
    if (below(3) == 0) {
      request.constraint = std::make_shared<ThirdConstraint>();
    }
    add_bans(params);
    request.logprobs = below(2) == 0 ? below(8) : -1;
    request.prompt_logprobs = below(8) == 0 ? 2 : -1;
    request.return_logits = below(10) == 0;
    request.n = 1 + below(2);
    return request;
  }

 private:
  std::int32_t below(std::int32_t bound) { return static_cast<std::int32_t>(random_() % static_cast<unsigned>(bound)); }

  void add_bans(SamplingParams& params) {
    if (below(4) == 0) {
      params.bad_words = {{4 + below(30)}, {5, 6}, {7}};
    }
    if (below(4) == 0) {
      params.ignore_eos = false;
      params.min_tokens = below(params.max_tokens + 1);
    }
    if (below(6) == 0) {
      params.no_repeat_ngram_size = 1 + below(3);
    }
    if (below(6) == 0) {
      params.allowed_token_ids = {2, 3, 9, 10, 20, 30, 31, 33, 36};
    }
    if (below(12) == 0) {
      params.logit_bias = {{5, 2.0}, {11, -3.0}};
    }
    if (below(12) == 0) {
      params.typical_p = 0.75;
    }
  }

  std::mt19937 random_;
};

void expect_same_logprobs(const std::vector<TokenLogprobs>& got, const std::vector<TokenLogprobs>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].token_id, want[i].token_id);
    EXPECT_EQ(got[i].logprob, want[i].logprob);
    EXPECT_EQ(got[i].top, want[i].top);
  }
}

/// Runs `requests` a few at a time, cancelling some.
void run(Batch& batch, const std::vector<Request>& requests) {
  RequestId last = 0;
  for (const Request& request : requests) {
    last = batch.add(request);
    batch.step();
    if (last % 11 == 0) {
      batch.cancel(last);
    }
  }
  batch.run_to_end();
}

/// All that requests give on a runner of `support` is what they give on one that gives logits.
void expect_host_answers(const SamplingSupport& support, std::int32_t num_kv_blocks, bool speculates, unsigned seed) {
  RandomRequests random(seed);
  std::vector<Request> requests(60);
  std::ranges::generate(requests, [&] { return random.next(); });
  ManagerConfig config;
  config.num_kv_blocks = num_kv_blocks;
  config.num_speculative_tokens = speculates ? 3 : 0;
  MockProposer proposer(small_shape(), 3);
  MockProposer same_proposer(small_shape(), 3);
  BackgroundThread background;
  BatchOptions options = sampling_options(support);
  options.background = &background;
  options.proposer = speculates ? &proposer : nullptr;
  Batch on_runner(config, options);
  BatchOptions host_options;
  host_options.proposer = speculates ? &same_proposer : nullptr;
  Batch on_host(config, host_options);
  run(on_runner, requests);
  run(on_host, requests);
  EXPECT_GT(on_runner.runner->num_drawn_tokens(), 0);
  EXPECT_EQ(on_runner.batcher.stats().preemptions > 0, num_kv_blocks < 100);
  EXPECT_EQ(on_runner.batcher.stats().preemptions, on_host.batcher.stats().preemptions);
  ASSERT_EQ(on_runner.last_of.size(), on_host.last_of.size());
  for (const auto& [key, want] : on_host.last_of) {
    SCOPED_TRACE("seed " + std::to_string(seed) + ", request " + std::to_string(key.first));
    EXPECT_EQ(on_runner.tokens_of[key], on_host.tokens_of[key]);
    EXPECT_EQ(on_runner.last_of[key].finish_reason, want.finish_reason);
    EXPECT_EQ(on_runner.last_of[key].error_kind, want.error_kind);
    EXPECT_EQ(on_runner.last_of[key].error_message, want.error_message);
    expect_same_logprobs(on_runner.logprobs_of[key], on_host.logprobs_of[key]);
  }
}

TEST(BatchDeviceSampling, AnswersAreThoseOfTheHostsSampler) {
  const SamplingSupport masks{.masks = true};
  const SamplingSupport two_slots{.count_slots = 2};
  const SamplingSupport lists{.max_logprobs = 4};
  const SamplingSupport few{.masks = true, .count_slots = 3, .max_logprobs = 20};
  unsigned seed = 0;
  for (const SamplingSupport& support : {kAll, masks, two_slots, lists, few}) {
    for (const std::int32_t num_kv_blocks : {200, 26}) {  // the latter preempts
      for (const bool speculates : {false, true}) {
        expect_host_answers(support, num_kv_blocks, speculates, ++seed);
      }
    }
  }
}

/// Each by itself is drawn by a runner that can do it, without a row of logits.
TEST(BatchDeviceSampling, WhatTheRunnerCanDoNeedsNoLogits) {
  const std::vector<std::function<void(Request&)>> needs = {
      [](Request& request) { request.logprobs = 2; },
      [](Request& request) { request.logprobs = 0; },
      [](Request& request) { request.sampling.repetition_penalty = 1.5; },
      [](Request& request) { request.sampling.presence_penalty = 0.5; },
      [](Request& request) { request.sampling.frequency_penalty = -0.5; },
      [](Request& request) { request.sampling.bad_words = {{7}, {8, 9}}; },
      [](Request& request) { request.sampling.no_repeat_ngram_size = 2; },
      [](Request& request) { request.sampling.allowed_token_ids = {5, 6, 7, 8}; },
      [](Request& request) { request.sampling.min_tokens = 3; },
      [](Request& request) { request.constraint = std::make_shared<ThirdConstraint>(); },
  };
  for (std::size_t i = 0; i < needs.size(); ++i) {
    Batch batch({}, sampling_options(kAll));
    Request request = greedy_request({4, 5, 6}, 8);
    needs[i](request);
    batch.add(request);
    batch.run_to_end();
    const auto num_forced = batch.batcher.stats().forced_tokens;
    EXPECT_EQ(batch.runner->num_drawn_tokens() + num_forced, std::ssize(batch.tokens[1])) << "need " << i;
    if (request.constraint == nullptr) {
      EXPECT_EQ(batch.tokens[1], expected_output(request, small_shape(), 48, testing::kEos).tokens) << "need " << i;
    }
  }
}

TEST(BatchDeviceSampling, WhoFindsNoSlotIsSampledByTheHost) {
  Batch batch({}, sampling_options({.count_slots = 1}));
  Request request = greedy_request({4, 5, 6}, 10);
  request.sampling.repetition_penalty = 1.5;
  batch.add(request);
  batch.add(request);
  batch.run_to_end();
  EXPECT_EQ(batch.runner->num_drawn_tokens(), 10);
  EXPECT_EQ(batch.tokens[1], expected_output(request, small_shape(), 48, {}).tokens);
  EXPECT_EQ(batch.tokens[2], batch.tokens[1]);
}

TEST(BatchDeviceSampling, NothingAllowedIsTheFaultOfTheRequest) {
  for (const SamplingSupport& support : {SamplingSupport{}, kAll}) {
    Batch batch({}, sampling_options(support));
    Request request = greedy_request({4, 5}, 6);
    request.sampling.allowed_token_ids = {7};
    request.sampling.bad_words = {{7}};
    const RequestId id = batch.add(request);
    batch.run_to_end();
    EXPECT_EQ(batch.last[id].error_kind, ErrorKind::kInvalidRequest);
    EXPECT_NE(batch.last[id].error_message.find("no token is allowed"), std::string::npos);
  }
}

TEST(BatchDeviceSampling, DamagedRowsEndTheirRequestsOnly) {
  Batch batch({}, sampling_options(kAll));
  Request healthy = greedy_request({4, 5}, 6);
  healthy.logprobs = 1;
  Request poisoned = greedy_request({testing::kNanToken, 5}, 6);
  poisoned.logprobs = 3;
  poisoned.sampling.repetition_penalty = 2.0;
  const RequestId before = batch.add(healthy);
  const RequestId damaged = batch.add(poisoned);
  const RequestId after = batch.add(healthy);
  batch.run_to_end();
  EXPECT_EQ(batch.last[damaged].error_kind, ErrorKind::kInternal);
  EXPECT_NE(batch.last[damaged].error_message.find("NaN"), std::string::npos);
  for (const RequestId id : {before, after}) {
    EXPECT_EQ(batch.tokens[id], expected_output(healthy, small_shape(), 48, {}).tokens);
    EXPECT_EQ((batch.logprobs_of[{id, 0}].size()), 6U);
  }
}

}  // namespace
}  // namespace aotllm
