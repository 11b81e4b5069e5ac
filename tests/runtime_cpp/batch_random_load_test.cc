#include "manager/inflight_batcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "batch_fixture.h"

namespace aotllm {
namespace {

using testing::Batch;
using testing::BatchOptions;
using testing::expected_output;
using testing::kEos;
using testing::kNanToken;
using testing::MockProposer;
using testing::Output;
using testing::small_shape;
using testing::windowed_shape;

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

}  // namespace
}  // namespace aotllm
