#include "manager/inflight_batcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "batch_fixture.h"

namespace aotllm {
namespace {

using testing::Batch;
using testing::BatchOptions;
using testing::expected_output;
using testing::FakeRunner;
using testing::kEos;
using testing::kNanToken;
using testing::MockProposer;
using testing::Output;
using testing::small_shape;
using testing::windowed_shape;

Request request(std::vector<TokenId> prompt, std::int32_t max_tokens) {
  return testing::greedy_request(std::move(prompt), max_tokens);
}

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}

  std::int32_t between(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(engine_() % static_cast<std::uint32_t>(high - low + 1));
  }

  bool one_in(std::int32_t n) { return between(1, n) == 1; }

  /// One of a few texts cut somewhere, often at a block's edge or beside it, with a random end or without.
  std::vector<TokenId> prompt(std::int32_t max_len) {
    std::vector<TokenId> tokens;
    const TokenId text = between(0, 3);
    std::int32_t shared = between(0, max_len);
    if (one_in(2)) {
      shared = std::clamp(shared / 4 * 4 + between(-1, 1), 0, max_len);
    }
    for (std::int32_t i = 0; i < shared; ++i) {
      tokens.push_back(4 + (text * 7 + i * (text + 1)) % 33);
    }
    const std::int32_t own = one_in(3) || shared == 0 ? between(shared == 0 ? 1 : 0, max_len - shared) : 0;
    for (std::int32_t i = 0; i < std::max(own, shared == 0 ? 1 : 0); ++i) {
      tokens.push_back(between(kNanToken + 1, 36));
    }
    return tokens;
  }

  Request request(std::int32_t max_seq_len) {
    Request request;
    request.prompt_token_ids = prompt(max_seq_len - 1);
    request.priority = between(0, 2);
    request.n = one_in(4) ? between(2, 4) : 1;
    request.cache_salt = one_in(5) ? "tenant" : "";
    request.adapter = one_in(5) ? between(1, 2) : 0;
    request.retention_priority = between(0, 100);
    request.prompt_logprobs = one_in(6) ? between(0, 3) : -1;
    SamplingParams& params = request.sampling;
    params.max_tokens = between(1, max_seq_len);
    params.temperature = between(0, 1) == 0 ? 0.0 : 1.0;
    params.seed = between(0, 1000);
    params.top_k = between(0, 5);
    params.ignore_eos = between(0, 2) > 0;
    if (one_in(4)) {
      params.stop_token_ids = {between(0, small_shape().vocab_size - 1)};
    }
    if (one_in(2)) {
      add_processors(params);
    }
    return request;
  }

  /// Likewise, but its next step may begin before the tokens of the one before are known.
  Request plain_request(std::int32_t max_seq_len) {
    Request plain = request(max_seq_len);
    plain.prompt_logprobs = -1;
    const SamplingParams params = std::exchange(plain.sampling, {});
    plain.sampling.max_tokens = params.max_tokens;
    plain.sampling.temperature = params.temperature;
    plain.sampling.seed = params.seed;
    plain.sampling.top_k = params.top_k;
    plain.sampling.ignore_eos = params.ignore_eos;
    plain.sampling.stop_token_ids = params.stop_token_ids;
    return plain;
  }

  void add_processors(SamplingParams& params) {
    params.repetition_penalty = 0.5 * between(1, 4);
    params.presence_penalty = between(-2, 2);
    params.frequency_penalty = 0.25 * between(-4, 4);
    params.no_repeat_ngram_size = between(0, 1) * between(2, 4);
    params.logit_bias = {{between(4, 36), 2.0}, {between(4, 36), -100.0}};
    params.bad_words = {{between(4, 36)}, {between(4, 36), between(4, 36)}};
    params.min_tokens = between(0, params.max_tokens);
    if (between(0, 1) == 0) {
      params.allowed_token_ids.resize(20);
      std::iota(params.allowed_token_ids.begin(), params.allowed_token_ids.end(), between(2, 17));
    }
  }

  ManagerConfig config(const ModelShape& shape) {
    ManagerConfig config;
    config.num_kv_blocks = between(shape.kv_groups.size() == 1 ? 1 : 3, 30);
    config.max_batch_size = between(1, 8);
    config.max_num_tokens = between(1, 32);
    config.max_chunk_tokens = between(0, 12);
    config.kv_host_bytes = one_in(3) ? between(1, 40) * 64 : 0;
    config.enable_prefix_caching = !one_in(5);
    config.capacity_policy = one_in(3) ? CapacityPolicy::kGuaranteedNoEvict : CapacityPolicy::kMaxUtilization;
    config.queue_policy = std::array{QueuePolicy::kFcfs, QueuePolicy::kPriority,
                                     QueuePolicy::kLongestPrefix}[static_cast<std::size_t>(between(0, 2))];
    config.max_wait_steps = between(1, 200);
    config.num_speculative_tokens = between(0, 4);
    config.max_kv_events = one_in(4) ? 50 : 0;
    return config;
  }

 private:
  std::mt19937 engine_;
};

// ---------------------------------------------------------------------------------------------------------------------
// The oracle: whatever else runs, a request's answer is the one it gets alone.

/// What random load has shown.
struct Witness {
  std::int64_t steps = 0;
  std::int64_t ahead = 0;
  std::int64_t preemptions = 0;
  std::int64_t cancelled = 0;
  std::int64_t hit_tokens = 0;
  std::int64_t copied = 0;
  std::int64_t onloaded = 0;
  std::int64_t accepted = 0;
  std::int64_t drawn = 0;   ///< by the runner
  std::int64_t queued = 0;  ///< steps behind others
};

enum class Kind { kAny, kPlain };

void expect_answer(Batch& batch, const ModelShape& shape, RequestId id, std::int32_t index, const Request& request,
                   Witness& witness) {
  ASSERT_TRUE(batch.ended(id, index));
  const Output expected = expected_output(request, shape, batch.limits.max_seq_len, kEos, index);
  const Response& last = batch.last_of[{id, index}];
  const std::vector<TokenId>& tokens = batch.tokens_of[{id, index}];
  ASSERT_NE(last.finish_reason, FinishReason::kError) << last.error_message;
  if (last.finish_reason == FinishReason::kCancelled) {
    ASSERT_LE(tokens.size(), expected.tokens.size());
    ASSERT_TRUE(std::equal(tokens.begin(), tokens.end(), expected.tokens.begin()));
    ++witness.cancelled;
    return;
  }
  ASSERT_EQ((Output{tokens, *last.finish_reason}), expected);
  ASSERT_EQ(last.stop_token_id.has_value(), expected.reason == FinishReason::kStop);
  ASSERT_EQ(last.num_prompt_tokens, static_cast<std::int32_t>(request.prompt_token_ids.size()));
  if (index == 0 && request.prompt_logprobs >= 0) {
    const std::vector<TokenLogprobs>& scores = batch.prompt_logprobs[id];
    ASSERT_EQ(scores.size() + 1, request.prompt_token_ids.size());
    for (std::size_t i = 0; i < scores.size(); ++i) {
      ASSERT_EQ(scores[i].token_id, request.prompt_token_ids[i + 1]);
      ASSERT_EQ(scores[i].top.size(), static_cast<std::size_t>(request.prompt_logprobs));
    }
  }
}

void random_load(std::uint32_t seed, const ModelShape& shape, BatchOptions options, Witness& witness, Kind kind) {
  SCOPED_TRACE(seed);
  Random random(seed);
  MockProposer proposer(shape, static_cast<std::uint64_t>(random.between(1, 9)));
  options.shape = shape;
  options.proposer = random.one_in(2) && kind == Kind::kAny ? &proposer : nullptr;
  Batch batch(random.config(shape), options);
  if (batch.limits.max_seq_len < 2) {
    return;
  }
  std::map<RequestId, Request> requests;
  const std::int32_t count = random.between(1, 25);
  while (static_cast<std::int32_t>(requests.size()) < count || !batch.batcher.idle()) {
    while (static_cast<std::int32_t>(requests.size()) < count && random.one_in(2)) {
      const Request request = kind == Kind::kAny ? random.request(batch.limits.max_seq_len)
                                                 : random.plain_request(batch.limits.max_seq_len);
      requests[batch.add(request)] = request;
    }
    if (random.one_in(30) && !requests.empty()) {
      batch.cancel(random.between(1, static_cast<std::int32_t>(requests.size())), random.between(-1, 2));
    }
    if (random.one_in(100)) {
      batch.batcher.clear_cache();
    }
    batch.step();
  }
  std::int64_t sequences = 0;
  for (const auto& [id, request] : requests) {
    SCOPED_TRACE(id);
    for (std::int32_t index = 0; index < request.n; ++index, ++sequences) {
      expect_answer(batch, shape, id, index, request, witness);
    }
  }
  const Stats stats = batch.batcher.stats();
  ASSERT_EQ(stats.blocks_used, 0);
  ASSERT_EQ(stats.finished, sequences);
  witness.steps += stats.steps;
  witness.ahead += stats.steps_planned_ahead;
  witness.preemptions += stats.preemptions;
  witness.hit_tokens += stats.cache.hit_tokens;
  witness.copied += stats.cache.copied_blocks;
  witness.onloaded += stats.cache.onloaded_blocks;
  witness.accepted += stats.accepted_tokens;
  witness.drawn += batch.runner->num_drawn_tokens();
  witness.queued += stats.steps_queued;
}

void random_loads(std::uint32_t count, const BatchOptions& options, Witness& witness, Kind kind = Kind::kAny) {
  for (std::uint32_t seed = 0; seed < count && !::testing::Test::HasFatalFailure(); ++seed) {
    try {
      random_load(seed, seed % 3 == 0 ? windowed_shape() : small_shape(), options, witness, kind);
    } catch (const std::exception& e) {
      FAIL() << "seed " << seed << ": " << e.what();
    }
  }
}

TEST(InflightBatcher, AnswersAreTheSameWhereTheRunnerSamples) {
  Witness witness;
  random_loads(500, testing::sampling_options(), witness);
  EXPECT_GT(witness.preemptions, 100);
  EXPECT_GT(witness.accepted, 300);
  EXPECT_GT(witness.drawn, 3000);
}

TEST(InflightBatcher, AnswersAreTheSameWhereStepsAreQueued) {
  Witness witness;
  random_loads(1000, testing::options_with<testing::QueueingRunner>(), witness, Kind::kPlain);
  EXPECT_GT(witness.queued, witness.steps / 3);
  EXPECT_GT(witness.preemptions, 100);
  EXPECT_GT(witness.cancelled, 30);
  EXPECT_GT(witness.copied, 100);
  EXPECT_GT(witness.onloaded, 50);
  const std::int64_t queued = witness.queued;
  random_loads(500, testing::options_with<testing::QueueingRunner>(), witness);
  EXPECT_GT(witness.queued, queued);
  EXPECT_GT(witness.accepted, 300);
}

TEST(InflightBatcher, AnswersAreThoseOfARequestAloneUnderRandomLoad) {
  Witness witness;
  random_loads(1500, {}, witness);
  EXPECT_EQ(witness.drawn, 0);
  // The load does test what it is meant to.
  EXPECT_GT(witness.ahead, witness.steps / 4);
  EXPECT_GT(witness.preemptions, 300);
  EXPECT_GT(witness.cancelled, 50);
  EXPECT_GT(witness.hit_tokens, 10000);
  EXPECT_GT(witness.copied, 300);
  EXPECT_GT(witness.onloaded, 100);
  EXPECT_GT(witness.accepted, 1000);
}

/// Flips one entry of one block table in every step: a mistake that a real runner would not notice.
class FlippingRunner final : public FakeRunner {
 public:
  using FakeRunner::FakeRunner;

  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override {
    std::vector<SequenceStep> flipped(sequences.begin(), sequences.end());
    std::vector<BlockId> table(sequences[0].block_tables[0].begin(), sequences[0].block_tables[0].end());
    if (sequences[0].start_position >= shape().tokens_per_block) {
      table[0] = table[0] == 0 ? 1 : table[0] - 1;
      flipped[0].block_tables[0] = table;
    }
    FakeRunner::step(flipped, outputs);
  }
};

TEST(InflightBatcher, TheOracleSeesASingleWrongBlock) {
  BatchOptions options;
  options.make_runner = [](const ModelShape& shape, FakeRunner::Hook hook) {
    return std::make_unique<FlippingRunner>(shape, std::move(hook));
  };
  Batch batch({}, options);
  const Request asked = request({4, 5, 6, 7, 8, 9}, 20);
  EXPECT_NE(batch.answer(asked), expected_output(asked, small_shape(), 48, {}).tokens);
}

TEST(InflightBatcher, PreemptionRecomputesAndLosesNothing) {
  ManagerConfig config;
  config.num_kv_blocks = 12;  // three sequences of 4 + 40 tokens want 33
  Batch batch(config);
  std::vector<Request> requests = {request({4, 5, 6, 7}, 40), request({8, 9, 10, 11}, 40),
                                   request({12, 13, 14, 15}, 40)};
  for (const Request& r : requests) {
    batch.add(r);
  }
  batch.run_to_end();
  EXPECT_GE(batch.batcher.stats().preemptions, 2);
  for (RequestId id = 1; id <= 3; ++id) {
    const Output expected = expected_output(requests[static_cast<std::size_t>(id - 1)], small_shape(), 48, {});
    EXPECT_EQ(batch.tokens[id], expected.tokens);
    EXPECT_EQ(batch.last[id].finish_reason, FinishReason::kLength);
  }
}

TEST(InflightBatcher, APoolOfOneSequenceServesAllInTurn) {
  ManagerConfig config;
  config.num_kv_blocks = 12;
  Batch batch(config);
  for (int i = 0; i < 10; ++i) {
    batch.add(request(std::vector<TokenId>(20, 5), 28));
  }
  batch.run_to_end();
  EXPECT_EQ(batch.batcher.stats().finished, 10);
  for (const auto& [id, last] : batch.last) {
    EXPECT_EQ(last.finish_reason, FinishReason::kLength);
    EXPECT_EQ(batch.tokens[id].size(), 28U);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Batching

TEST(InflightBatcher, RequestsJoinAndLeaveAtEveryStep) {
  Batch batch({});
  const RequestId first = batch.add(request({4}, 3));
  batch.step();
  const RequestId second = batch.add(request({5}, 1));
  batch.step();
  EXPECT_TRUE(batch.ended(second));
  EXPECT_EQ(batch.tokens[first].size(), 2U);
  batch.step();
  EXPECT_TRUE(batch.ended(first));
  EXPECT_EQ(batch.batcher.stats().steps, 3);
}

TEST(InflightBatcher, ALongPromptDoesNotHoldUpAGeneration) {
  ManagerConfig config;
  config.max_num_tokens = 8;
  config.max_chunk_tokens = 5;
  Batch batch(config);
  const RequestId short_one = batch.add(request({4}, 20));
  batch.step();
  const RequestId long_one = batch.add(request(std::vector<TokenId>(23, 5), 1));
  for (std::size_t step = 1; step <= 5; ++step) {
    EXPECT_FALSE(batch.ended(long_one));
    batch.step();
    EXPECT_EQ(batch.tokens[short_one].size(), 1 + step);
  }
  EXPECT_TRUE(batch.ended(long_one));  // 5 + 5 + 5 + 5 + 3
  EXPECT_EQ(batch.batcher.stats().context_tokens, 1 + 23);
}

TEST(InflightBatcher, HigherPriorityIsAdmittedFirst) {
  ManagerConfig config;
  config.max_batch_size = 1;
  Batch batch(config);
  const RequestId running = batch.add(request({4}, 2));
  batch.step();
  const RequestId normal = batch.add(request({5}, 1));
  Request urgent_request = request({6}, 1);
  urgent_request.priority = 1;
  const RequestId urgent = batch.add(urgent_request);
  batch.step();
  EXPECT_TRUE(batch.ended(running));
  batch.step();
  EXPECT_TRUE(batch.ended(urgent));
  EXPECT_FALSE(batch.ended(normal));
}

// ---------------------------------------------------------------------------------------------------------------------
// Ends

TEST(InflightBatcher, EndsOnStopTokensEosAndLengths) {
  const Request base = request({4, 5, 6}, 30);
  const std::vector<TokenId> tokens = expected_output(base, small_shape(), 48, {}).tokens;
  Batch batch({});

  Request stops = base;
  stops.sampling.stop_token_ids = {tokens[4]};
  const auto first = static_cast<std::size_t>(std::find(tokens.begin(), tokens.end(), tokens[4]) - tokens.begin());
  const RequestId stopped = batch.add(stops);
  const RequestId by_max_tokens = batch.add(base);
  Request endless = base;
  endless.sampling.max_tokens = 1000;
  const RequestId by_context = batch.add(endless);
  batch.run_to_end();

  EXPECT_EQ(batch.last[stopped].finish_reason, FinishReason::kStop);
  EXPECT_EQ(batch.last[stopped].stop_token_id, tokens[4]);
  EXPECT_EQ(batch.tokens[stopped],
            std::vector<TokenId>(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(first) + 1));
  EXPECT_EQ(batch.last[by_max_tokens].finish_reason, FinishReason::kLength);
  EXPECT_EQ(batch.last[by_max_tokens].stop_token_id, std::nullopt);
  EXPECT_EQ(batch.tokens[by_max_tokens], tokens);
  EXPECT_EQ(batch.last[by_context].finish_reason, FinishReason::kLength);
  EXPECT_EQ(batch.tokens[by_context].size(), 45U);  // 3 + 45 = max_seq_len
}

TEST(InflightBatcher, LogprobsAndLogitsBelongToTheirTokens) {
  Request with_all = request({4, 5}, 4);
  with_all.logprobs = 2;
  with_all.return_logits = true;
  Batch batch({});
  batch.add(request({9}, 9));  // a mate in the batch
  const RequestId id = batch.add(with_all);
  std::vector<TokenId> sequence = with_all.prompt_token_ids;
  for (int i = 0; i < 4; ++i) {
    batch.step();
    const Response& response = batch.last[id];
    ASSERT_EQ(response.token_ids.size(), 1U);
    ASSERT_EQ(response.logprobs.size(), 1U);
    ASSERT_EQ(response.logits.size(), 1U);
    const std::uint64_t hash = testing::hash_of(
        small_shape(), static_cast<std::int32_t>(sequence.size()) - 1, [&](int, std::int32_t position) {
          return testing::Slot{sequence[static_cast<std::size_t>(position)], position, 0};
        });
    std::vector<float> row(37);
    testing::fake_logits(hash, sequence[0], row);
    EXPECT_EQ(response.logits[0], row);
    EXPECT_EQ(response.logprobs[0].token_id, response.token_ids[0]);
    EXPECT_EQ(response.logprobs[0].top.size(), 2U);
    EXPECT_EQ(response.logprobs[0].top[0].first, response.token_ids[0]);  // greedy
    EXPECT_EQ(response.logprobs[0].top[0].second, response.logprobs[0].logprob);
    sequence.push_back(response.token_ids[0]);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Cancellation and failures

TEST(InflightBatcher, CancelFreesEverythingInEachState) {
  ManagerConfig config;
  config.num_kv_blocks = 13;
  config.max_batch_size = 2;
  config.max_chunk_tokens = 5;
  config.enable_prefix_caching = false;
  Batch batch(config);
  for (int round = 0; round < 100; ++round) {
    const RequestId generating = batch.add(request({4}, 40));
    const RequestId in_context = batch.add(request(std::vector<TokenId>(20, 5), 10));
    const RequestId queued = batch.add(request({6}, 10));
    for (int i = 0; i < 2; ++i) {
      batch.step();
    }
    EXPECT_EQ(batch.batcher.stats().running, 2);
    EXPECT_EQ(batch.batcher.stats().queued, 1);
    EXPECT_FALSE(batch.tokens.contains(in_context));
    for (const RequestId id : {queued, in_context, generating}) {
      batch.cancel(id);
      EXPECT_EQ(batch.last[id].finish_reason, FinishReason::kCancelled);
      batch.cancel(id);  // once more: no-op
    }
    EXPECT_TRUE(batch.batcher.idle());
    EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
  }
  batch.cancel(-1);
  batch.cancel(123456);
  EXPECT_EQ(batch.batcher.stats().finished, 300);
}

TEST(InflightBatcher, CancelOfAPreemptedRequest) {
  ManagerConfig config;
  config.num_kv_blocks = 12;
  Batch batch(config);
  batch.add(request(std::vector<TokenId>(8, 4), 40));
  const RequestId victim = batch.add(request(std::vector<TokenId>(8, 5), 40));
  while (batch.batcher.stats().preemptions == 0) {
    batch.step();
  }
  const auto said_before = batch.tokens[victim].size();
  EXPECT_GT(said_before, 0U);
  batch.cancel(victim);
  batch.run_to_end();
  EXPECT_EQ(batch.tokens[victim].size(), said_before);
  EXPECT_EQ(batch.last[victim].finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
}

TEST(InflightBatcher, AStepThatThrowsEndsItsRequestsOnly) {
  ManagerConfig config;
  config.max_batch_size = 2;
  for (std::int64_t bad_step = 0; bad_step < 12; ++bad_step) {
    SCOPED_TRACE(bad_step);
    BatchOptions options;
    options.hook = [bad_step](std::int64_t step) {
      if (step == bad_step) {
        throw std::runtime_error("a blown fuse");
      }
    };
    Batch batch(config, options);
    std::vector<Request> requests;
    for (TokenId token = 4; token < 10; ++token) {
      requests.push_back(request({token}, 4));
      batch.add(requests.back());
    }
    batch.run_to_end();
    int failed = 0;
    for (RequestId id = 1; id <= 6; ++id) {
      const Response& last = batch.last[id];
      if (last.finish_reason == FinishReason::kError) {
        ++failed;
        EXPECT_EQ(last.error_kind, ErrorKind::kInternal);
        EXPECT_NE(last.error_message.find("a blown fuse"), std::string::npos);
      } else {
        EXPECT_EQ(batch.tokens[id],
                  expected_output(requests[static_cast<std::size_t>(id - 1)], small_shape(), 48, {}).tokens);
      }
    }
    EXPECT_EQ(failed, 2);
    EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
  }
}

TEST(InflightBatcher, NanLogitsEndTheirRequestOnly) {
  Batch batch({});
  const Request healthy = request({4, 5}, 6);
  const RequestId before = batch.add(healthy);
  const RequestId poisoned = batch.add(request({kNanToken, 5}, 6));
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

TEST(InflightBatcher, AProcessorThatThrowsEndsItsRequestOnly) {
  class Broken final : public LogitsProcessor {
    void apply(std::span<float>, std::span<const TokenId> tokens, std::int32_t) override {
      if (tokens.size() == 3) {
        throw std::runtime_error("empty grammar stack");
      }
    }
  };
  Batch batch({});
  const RequestId healthy = batch.add(request({4, 5}, 6));
  auto sequence = std::make_unique<Sequence>(99, 0, request({4, 5}, 6), 0, Clock::time_point{}, batch.limits);
  sequence->processors.constraints.push_back(std::make_unique<Broken>());
  batch.add_sequence(std::move(sequence));
  batch.run_to_end();
  EXPECT_EQ(batch.last[healthy].finish_reason, FinishReason::kLength);
  EXPECT_EQ(batch.last[99].finish_reason, FinishReason::kError);
  EXPECT_EQ(batch.tokens[99].size(), 1U);
  EXPECT_NE(batch.last[99].error_message.find("empty grammar stack"), std::string::npos);
}

TEST(InflightBatcher, ARequestThatRulesOutAllTokensEndsAlone) {
  Batch batch({});
  const Request healthy = request({4, 5}, 6);
  const RequestId before = batch.add(healthy);
  Request impossible = request({4, 5}, 6);
  impossible.sampling.allowed_token_ids = {7, 8};
  impossible.sampling.no_repeat_ngram_size = 1;  // the third token has nothing left
  const RequestId id = batch.add(impossible);
  const RequestId after = batch.add(healthy);
  batch.run_to_end();
  EXPECT_EQ(batch.last[id].finish_reason, FinishReason::kError);
  EXPECT_EQ(batch.last[id].error_kind, ErrorKind::kInvalidRequest);
  EXPECT_NE(batch.last[id].error_message.find("no token is allowed"), std::string::npos);
  EXPECT_EQ(batch.tokens[id].size(), 2U);
  const std::vector<TokenId> expected = expected_output(healthy, small_shape(), 48, {}).tokens;
  EXPECT_EQ(batch.tokens[before], expected);
  EXPECT_EQ(batch.tokens[after], expected);
}

TEST(InflightBatcher, FailAllEndsWaitingAndRunningOnes) {
  ManagerConfig config;
  config.max_batch_size = 1;
  Batch batch(config);
  batch.add(request({4}, 6));
  batch.add(request({5}, 6));
  batch.step();
  batch.batcher.plan();
  batch.batcher.fail_all("out of order");
  EXPECT_TRUE(batch.batcher.idle());
  EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
  batch.batcher.run();  // nothing is left of the plan
  EXPECT_EQ(batch.batcher.take_responses().size(), 2U);
}

TEST(Sequence, RefusesMovesThatItsLifeDoesNotHave) {
  const Limits limits = resolve_limits(small_shape(), {}, {});
  Sequence sequence(1, 0, request({4}, 6), 0, Clock::time_point{}, limits);
  EXPECT_THROW(sequence.move_to(SequenceState::kGenerating), Error);
  sequence.move_to(SequenceState::kContext);
  EXPECT_THROW(sequence.move_to(SequenceState::kContext), Error);
  sequence.move_to(SequenceState::kGenerating);
  sequence.move_to(SequenceState::kQueued);  // preempted
  sequence.move_to(SequenceState::kFinished);
  EXPECT_THROW(sequence.move_to(SequenceState::kFinished), Error);
  EXPECT_THROW(sequence.move_to(SequenceState::kQueued), Error);
}

}  // namespace
}  // namespace aotllm
