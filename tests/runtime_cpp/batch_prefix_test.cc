// Prefix cache, shared prompts and preemption as the batcher uses them.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <tuple>

#include "batch_fixture.h"

namespace aotllm {
namespace {

using testing::Batch;
using testing::BatchOptions;
using testing::expected_output;
using testing::greedy_request;
using testing::small_shape;
using testing::windowed_shape;

constexpr std::int32_t kBlock = 4;  // small_shape().tokens_per_block

std::vector<TokenId> text(std::int32_t length, TokenId first = 4) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(length));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

ManagerConfig many_blocks() {
  ManagerConfig config;
  config.num_kv_blocks = 100;
  return config;
}

TEST(BatchPrefix, ARepeatedPromptHitsAllButItsLastTokenAndAnswersAlike) {
  for (const ModelShape& shape : {small_shape(), windowed_shape()}) {
    BatchOptions options;
    options.shape = shape;
    for (std::int32_t length = 1; length <= 3 * kBlock + 1; ++length) {
      SCOPED_TRACE(length);
      Batch batch({}, options);
      const Request asked = greedy_request(text(length), 5);
      const std::vector<TokenId> cold = batch.answer(asked);
      EXPECT_EQ(batch.last[1].num_cached_tokens, 0);
      EXPECT_EQ(batch.answer(asked), cold);
      EXPECT_EQ(batch.last[2].num_cached_tokens, length - 1);
      EXPECT_EQ(cold, expected_output(asked, shape, 48, {}).tokens);
    }
  }
}

TEST(BatchPrefix, SharedPrefixesAtAndBesideBlockEdges) {
  for (std::int32_t shared = 1; shared <= 3 * kBlock + 1; ++shared) {
    SCOPED_TRACE(shared);
    Batch batch({});
    batch.answer(greedy_request(text(20), 5));
    std::vector<TokenId> prompt = text(shared);
    prompt.push_back(30);
    prompt.push_back(31);
    const Request asked = greedy_request(prompt, 8);
    batch.add(greedy_request({9, 9, 9}, 8));  // an uncached one beside it
    EXPECT_EQ(batch.answer(asked), expected_output(asked, small_shape(), 48, {}).tokens);
    EXPECT_EQ(batch.last[3].num_cached_tokens, shared);
  }
}

TEST(BatchPrefix, GeneratedTokensAreCachedToo) {
  Batch batch({});
  const std::vector<TokenId> answer = batch.answer(greedy_request(text(5), 10));
  std::vector<TokenId> next_turn = text(5);
  next_turn.insert(next_turn.end(), answer.begin(), answer.end());
  next_turn.push_back(7);
  batch.answer(greedy_request(next_turn, 3));
  EXPECT_EQ(batch.last[2].num_cached_tokens, 14) << "all but the last token that was drawn, which was never computed";
}

TEST(BatchPrefix, EqualPromptsOfOneStepAreComputedOnce) {
  for (const std::int32_t n : {1, 4}) {
    ManagerConfig config;
    config.max_chunk_tokens = 5;
    Batch batch(config);
    Request asked = greedy_request(text(21), 4);
    asked.n = n;
    for (std::int32_t i = 0; i < 4 / n; ++i) {
      batch.add(asked);
    }
    batch.run_to_end();
    // 21 tokens once, 3 times the one behind the last full block, and 3 generated tokens each.
    EXPECT_EQ(batch.runner->num_tokens(), 21 + 3 * 1 + 4 * 3) << n;
    for (const auto& [key, tokens] : batch.tokens_of) {
      EXPECT_EQ(tokens, expected_output(asked, small_shape(), 48, {}).tokens);
    }
  }
}

TEST(BatchPrefix, FourSequencesHoldOneCopyOfThePromptsBlocks) {
  Batch batch(many_blocks());
  Request asked = greedy_request(text(5 * kBlock), 8);
  asked.n = 4;
  asked.sampling.temperature = 1.0;
  asked.sampling.seed = 5;
  batch.add(asked);
  std::int64_t most = 0;
  while (!batch.batcher.idle()) {
    batch.step();
    most = std::max(most, batch.batcher.stats().blocks_used);
  }
  EXPECT_EQ(most, 5 + 4 * 2) << "the prompt's five, and two for each sequence's seven computed tokens";
  std::set<std::vector<TokenId>> different;
  for (std::int32_t index = 0; index < 4; ++index) {
    EXPECT_EQ((batch.tokens_of[{1, index}]), expected_output(asked, small_shape(), 48, {}, index).tokens);
    different.insert(batch.tokens_of[{1, index}]);
  }
  EXPECT_EQ(different.size(), 4U) << "each has draws of its own";
}

TEST(BatchPrefix, SaltsAndAdaptersKeepPrefixesApart) {
  Batch batch(many_blocks());
  Request asked = greedy_request(text(13), 2);
  batch.answer(asked);
  for (const auto& [salt, adapter, cached] : std::vector<std::tuple<std::string, AdapterId, std::int32_t>>{
           {"a", 0, 0}, {"b", 0, 0}, {"a", 0, 12}, {"", 1, 0}, {"", 1, 12}, {"", 0, 12}}) {
    asked.cache_salt = salt;
    asked.adapter = adapter;
    const RequestId id = batch.add(asked);
    batch.run_to_end();
    EXPECT_EQ(batch.last[id].num_cached_tokens, cached) << salt << ' ' << adapter;
    EXPECT_EQ(batch.tokens[id], expected_output(asked, small_shape(), 48, {}).tokens);
  }
}

TEST(BatchPrefix, SwitchedOffOnlySequencesOfOneRequestShare) {
  ManagerConfig config;
  config.enable_prefix_caching = false;
  Batch batch(config);
  Request asked = greedy_request(text(17), 2);
  asked.n = 2;
  batch.add(asked);
  batch.run_to_end();
  EXPECT_EQ((batch.last_of[{1, 1}].num_cached_tokens), 16);
  batch.add(asked);
  batch.run_to_end();
  EXPECT_EQ(batch.last[2].num_cached_tokens, 0);
}

TEST(BatchPrefix, AbortInTheMiddleOfAPromptThenTheSameAgain) {
  ManagerConfig config;
  config.max_chunk_tokens = 5;
  for (int chunks = 1; chunks <= 4; ++chunks) {
    Batch batch(config);
    const Request asked = greedy_request(text(20), 10);
    const RequestId aborted = batch.add(asked);
    for (int i = 0; i < chunks; ++i) {
      batch.step();
    }
    batch.cancel(aborted);
    EXPECT_EQ(batch.answer(asked), expected_output(asked, small_shape(), 48, {}).tokens);
    EXPECT_EQ(batch.last[2].num_cached_tokens, std::min(chunks * 5, 19));
  }
}

TEST(BatchPrefix, AFailedStepLeavesNothingInTheCache) {
  for (std::int64_t bad_step = 0; bad_step < 6; ++bad_step) {
    BatchOptions options;
    options.hook = [bad_step](std::int64_t step) {
      if (step == bad_step) {
        throw std::runtime_error("a blown fuse");
      }
    };
    ManagerConfig config;
    config.max_chunk_tokens = 5;
    Batch batch(config, options);
    const Request asked = greedy_request(text(20), 10);
    batch.answer(asked);
    EXPECT_EQ(batch.last[1].finish_reason, FinishReason::kError);
    EXPECT_EQ(batch.answer(asked), expected_output(asked, small_shape(), 48, {}).tokens);
  }
}

TEST(BatchPrefix, APreemptedSequenceFindsItsBlocksAgain) {
  ManagerConfig config;
  config.num_kv_blocks = 14;
  Batch batch(config);
  batch.add(greedy_request(text(8), 40));
  batch.add(greedy_request(text(8, 20), 40));
  batch.run_to_end();
  const Stats stats = batch.batcher.stats();
  EXPECT_GT(stats.preemptions, 0);
  EXPECT_GT(stats.cache.hit_tokens, 0);
  EXPECT_EQ(batch.tokens[2], expected_output(greedy_request(text(8, 20), 40), small_shape(), 48, {}).tokens);
}

TEST(BatchPrefix, TheHostTierTakesWhatIsEvictedAndGivesItBack) {
  ManagerConfig config;
  config.num_kv_blocks = 12;
  config.kv_host_bytes = 40 * 64;
  Batch batch(config);
  std::vector<Request> requests;
  for (TokenId first = 4; first < 12; ++first) {
    requests.push_back(greedy_request(text(24, first), 8));
  }
  for (const Request& asked : requests) {
    batch.answer(asked);
  }
  EXPECT_GT(batch.batcher.stats().cache.offloaded_blocks, 0);
  for (std::size_t i = 4; i < requests.size(); ++i) {
    EXPECT_EQ(batch.answer(requests[i]), expected_output(requests[i], small_shape(), 48, {}).tokens);
    EXPECT_GE(batch.last[static_cast<RequestId>(5 + i)].num_cached_tokens, 20);
  }
  EXPECT_GT(batch.batcher.stats().cache.onloaded_blocks, 0);
}

TEST(BatchPrefix, EventsTellWhatIsStored) {
  ManagerConfig config;
  config.max_kv_events = 100;
  Batch batch(config);
  batch.answer(greedy_request(text(9), 1));
  const std::vector<KvEvent> events = batch.batcher.take_events();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].kind, KvEvent::Kind::kStored);
  EXPECT_EQ(events[0].tokens, text(4));
  EXPECT_EQ(events[0].parent_key, 0U);
  EXPECT_EQ(events[1].tokens, text(4, 8));
  EXPECT_EQ(events[1].parent_key, events[0].key);
}

}  // namespace
}  // namespace aotllm
