// Embeddings: pooled hidden states of a prompt.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "batch_fixture.h"

namespace aotllm {
namespace {

using testing::Batch;
using testing::BatchOptions;
using testing::greedy_request;
using testing::kNanToken;
using testing::Slot;
using testing::small_shape;
using testing::windowed_shape;

Request pooled(Pooling pooling, std::vector<TokenId> prompt) {
  Request request;
  request.prompt_token_ids = std::move(prompt);
  request.pooling = pooling;
  return request;
}

std::vector<TokenId> prompt_of(std::int32_t length, TokenId seed = 5) {
  std::vector<TokenId> tokens;
  for (std::int32_t i = 0; i < length; ++i) tokens.push_back(4 + (seed + i * i) % 30);
  return tokens;
}

/// What the fake model gives for a prompt that has the machine to itself.
std::vector<float> expected_embedding(const Request& request, const ModelShape& shape) {
  const std::vector<TokenId>& tokens = request.prompt_token_ids;
  const auto num_tokens = static_cast<std::int32_t>(tokens.size());
  const auto width = static_cast<std::size_t>(shape.hidden_size);
  const bool last_only = request.pooling == Pooling::kLast;
  std::vector<double> sum(width);
  for (std::int32_t position = last_only ? num_tokens - 1 : 0; position < num_tokens; ++position) {
    const std::uint64_t hash = testing::hash_of(shape, position, [&](int /*group*/, std::int32_t seen) {
      return Slot{tokens[static_cast<std::size_t>(seen)], seen, request.adapter};
    });
    std::vector<float> row(width);
    testing::fake_hidden(hash, tokens[0], row);
    for (std::size_t i = 0; i < width; ++i) sum[i] += row[i];
  }
  std::vector<float> embedding;
  for (const double value : sum) embedding.push_back(static_cast<float>(value / (last_only ? 1 : num_tokens)));
  return embedding;
}

ManagerConfig config_of(std::int32_t max_chunk_tokens, std::int32_t num_kv_blocks = 0) {
  ManagerConfig config;
  config.max_chunk_tokens = max_chunk_tokens;
  config.num_kv_blocks = num_kv_blocks;
  return config;
}

void expect_embedding(const Batch& batch, RequestId id, const Request& request, const ModelShape& shape) {
  const Response& last = batch.last.at(id);
  EXPECT_EQ(last.finish_reason, FinishReason::kStop) << last.error_message;
  EXPECT_TRUE(batch.tokens.at(id).empty());
  EXPECT_EQ(last.embedding, expected_embedding(request, shape));  // to the bit
}

TEST(BatchPooling, IsTheSameWhateverTheBatchTheChunksAndTheWindows) {
  for (const ModelShape& shape : {small_shape(), windowed_shape()}) {
    for (const std::int32_t max_chunk_tokens : {0, 1, 3, 7}) {
      Batch batch(config_of(max_chunk_tokens), {.shape = shape});
      std::vector<std::pair<RequestId, Request>> asked;
      const Request beside = greedy_request({6, 7, 8}, 20);
      const RequestId generating = batch.add(beside);
      batch.step();
      for (const std::int32_t length : {1, 2, 4, 13, 40}) {
        for (const Pooling pooling : {Pooling::kLast, Pooling::kMean}) {
          asked.emplace_back(0, pooled(pooling, prompt_of(length, length)));
          asked.back().first = batch.add(asked.back().second);
        }
      }
      batch.run_to_end();
      for (const auto& [id, request] : asked) expect_embedding(batch, id, request, shape);
      EXPECT_EQ(batch.tokens[generating],
                testing::expected_output(beside, shape, shape.max_seq_len, testing::kEos).tokens);
    }
  }
}

TEST(BatchPooling, LastTakesWhatIsCachedMeanComputesInFullAndBothLeaveItToOthers) {
  for (const Pooling pooling : {Pooling::kLast, Pooling::kMean}) {
    Batch batch({});
    const Request request = pooled(pooling, prompt_of(20));
    for (const std::int32_t cached : {0, pooling == Pooling::kLast ? 19 : 0}) {
      const std::int64_t before = batch.runner->num_tokens();
      const RequestId id = batch.add(request);
      batch.run_to_end();
      expect_embedding(batch, id, request, small_shape());
      EXPECT_EQ(batch.last[id].num_cached_tokens, cached);
      EXPECT_EQ(batch.runner->num_tokens() - before, 20 - cached);
      EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
    }
    const RequestId generated = batch.add(greedy_request(prompt_of(20), 1));
    batch.run_to_end();
    EXPECT_EQ(batch.last[generated].num_cached_tokens, 19);
  }
}

TEST(BatchPooling, SurvivesPreemption) {
  // 14 blocks hold one prompt of 40 tokens and little else: the growing generations of higher priority take them.
  Batch batch(config_of(4, 14));
  std::vector<std::pair<RequestId, Request>> asked;
  for (const Pooling pooling : {Pooling::kMean, Pooling::kLast}) {
    asked.emplace_back(0, pooled(pooling, prompt_of(40, pooling == Pooling::kMean ? 1 : 2)));
    asked.back().first = batch.add(asked.back().second);
  }
  for (int i = 0; i < 4; ++i) batch.step();
  for (TokenId token = 10; token < 13; ++token) {
    Request rival = greedy_request({token, token}, 30);
    rival.priority = 1;
    rival.sampling.ignore_eos = true;
    batch.add(rival);
  }
  batch.run_to_end();
  EXPECT_GT(batch.batcher.stats().preemptions, 0);
  for (const auto& [id, request] : asked) expect_embedding(batch, id, request, small_shape());
}

TEST(BatchPooling, APromptMayBeAsLongAsTheContext) {
  const std::int32_t longest = small_shape().max_seq_len;
  for (const Pooling pooling : {Pooling::kLast, Pooling::kMean}) {
    Batch batch(config_of(0, longest / small_shape().tokens_per_block));  // just one such sequence
    const Request request = pooled(pooling, prompt_of(longest));
    const RequestId other = batch.add(greedy_request({5, 6}, 9));
    const RequestId id = batch.add(request);
    batch.run_to_end();
    expect_embedding(batch, id, request, small_shape());
    EXPECT_TRUE(batch.ended(other));
    try {
      batch.add(pooled(pooling, prompt_of(longest + 1)));
      ADD_FAILURE() << "not refused";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kContextTooLong);
    }
  }
}

TEST(BatchPooling, AdaptersAndSaltsKeepApart) {
  Batch batch({});
  Request request = pooled(Pooling::kLast, prompt_of(12));
  batch.add(request);
  batch.run_to_end();
  request.adapter = 3;
  const RequestId adapted = batch.add(request);
  batch.run_to_end();
  expect_embedding(batch, adapted, request, small_shape());
  EXPECT_EQ(batch.last[adapted].num_cached_tokens, 0);
  request.cache_salt = "pepper";
  const RequestId salted = batch.add(request);
  batch.run_to_end();
  EXPECT_EQ(batch.last[salted].num_cached_tokens, 0);
}

TEST(BatchPooling, CancelledOrLateItHasNone) {
  Batch batch(config_of(4));
  const RequestId cancelled = batch.add(pooled(Pooling::kMean, prompt_of(30, 1)));
  Request request = pooled(Pooling::kMean, prompt_of(30, 2));
  request.timeout = 5.0;
  const RequestId late = batch.add(request);
  batch.step();
  batch.cancel(cancelled);
  batch.batcher.expire(Clock::time_point{} + std::chrono::seconds(6));
  batch.collect();
  EXPECT_EQ(batch.last[cancelled].finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(batch.last[late].finish_reason, FinishReason::kTimeout);
  for (const RequestId id : {cancelled, late}) EXPECT_TRUE(batch.last[id].embedding.empty());
  EXPECT_TRUE(batch.batcher.idle());
  EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
}

TEST(BatchPooling, NumbersThatAreNoneFailTheirOwnRequest) {
  Batch batch({});
  const RequestId poisoned = batch.add(pooled(Pooling::kMean, {kNanToken, 5, 6}));
  const Request sound = pooled(Pooling::kMean, {5, 5, 6});
  const RequestId other = batch.add(sound);
  batch.run_to_end();
  EXPECT_EQ(batch.last[poisoned].error_kind, ErrorKind::kInternal);
  expect_embedding(batch, other, sound, small_shape());
}

/// Forgets a number.
class ShortRunner final : public testing::FakeRunner {
 public:
  using FakeRunner::FakeRunner;
  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override {
    FakeRunner::step(sequences, outputs);
    if (!outputs.hidden.empty()) outputs.hidden.pop_back();
  }
};

TEST(BatchPooling, TooFewNumbersFailTheStep) {
  BatchOptions options;
  options.make_runner = [](const ModelShape& shape, testing::FakeRunner::Hook hook) {
    return std::make_unique<ShortRunner>(shape, std::move(hook));
  };
  Batch batch({}, options);
  const RequestId id = batch.add(pooled(Pooling::kLast, {5, 6}));
  batch.run_to_end();
  EXPECT_EQ(batch.last[id].error_message, "the step returned 4 hidden values for 1 rows of 5");
  EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
}

TEST(BatchPooling, RefusesWhatBelongsToGeneratedText) {
  const std::vector<std::pair<const char*, std::function<void(Request&)>>> cases = {
      {"n", [](Request& r) { r.n = 2; }},
      {"logprobs", [](Request& r) { r.logprobs = 0; }},
      {"prompt_logprobs", [](Request& r) { r.prompt_logprobs = 0; }},
      {"return_logits", [](Request& r) { r.return_logits = true; }},
  };
  const auto refused = [](const ModelShape& shape, const std::function<void(Request&)>& change) -> std::string {
    Batch batch({}, {.shape = shape});
    Request request = pooled(Pooling::kLast, {5, 6});
    change(request);
    try {
      batch.add(request);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidRequest);
      return e.param();
    }
    return "nothing";
  };
  for (const auto& [param, change] : cases) EXPECT_EQ(refused(small_shape(), change), param);
  ModelShape without = small_shape();
  without.hidden_size = 0;
  EXPECT_EQ(refused(without, [](Request&) {}), "pooling");
}

}  // namespace
}  // namespace aotllm
