#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "allocation_counter.h"
#include "aotllm/cpu_runner.h"
#include "aotllm/errors.h"
#include "naive_model.h"
#include "random_tactics.h"
#include "support/strings.h"
#include "tiny_model.h"
#include "tiny_ranks.h"

namespace aotllm {
namespace {

using testing_support::NaiveModel;
using testing_support::Split;
using testing_support::TinyModel;
using testing_support::TinyRanks;
using testing_support::TinySpec;

constexpr TinySpec kSpec{.vocab = 51, .layers = 3, .kv_heads = 4, .bias = true, .qk_norm = true, .window = 5};

std::vector<Engine> engines_of(const TinyModel& model, const Split& split) {
  std::vector<Engine> engines;
  for (const auto& bytes : TinyRanks(model, split).engines()) {
    engines.push_back(Engine::from_bytes(bytes, cat("rank", engines.size())));
  }
  return engines;
}

CpuRunner make_runner(const TinyModel& model, const Split& split, int num_threads) {
  CpuRunner runner(engines_of(model, split), {num_threads, nullptr});
  runner.allocate_kv({.device_blocks = {16, 16, 16, 16}});
  return runner;
}

std::vector<TokenId> random_tokens(int count, int vocab) {
  std::mt19937 random(3);
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % static_cast<unsigned>(vocab));
  return tokens;
}

/// Logits [tokens, vocab] of a prompt that runs in chunks.
std::vector<float> logits_of(CpuRunner& runner, std::span<const TokenId> tokens, std::size_t chunk) {
  const std::vector<BlockId> blocks = {7, 2, 9, 4};
  std::vector<float> logits;
  StepOutputs outputs;
  for (std::size_t at = 0; at < tokens.size(); at += chunk) {
    const SequenceStep step{tokens.subspan(at, std::min(chunk, tokens.size() - at)),
                            static_cast<std::int32_t>(at),
                            {blocks, blocks, blocks, blocks},
                            LogitsMode::kAll};
    runner.step({&step, 1}, outputs);
    logits.insert(logits.end(), outputs.logits.begin(), outputs.logits.end());
  }
  return logits;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class CpuRanks : public testing::TestWithParam<bool> {};  // norms after the products

INSTANTIATE_TEST_SUITE_P(PostNorm, CpuRanks, testing::Bool());

TEST_P(CpuRanks, TogetherComputeWhatTheModelMeans) {
  TinySpec spec = kSpec;
  spec.post_norm = GetParam();
  const TinyModel model(spec);
  const auto tokens = random_tokens(50, spec.vocab);
  const auto expected = NaiveModel(model).forward(tokens);
  for (const Split& split : {Split{2, 1}, Split{4, 1}, Split{2, 2}, Split{4, 3}}) {
    CpuRunner runner = make_runner(model, split, 4);
    const auto logits = logits_of(runner, tokens, 50);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (int v = 0; v < spec.vocab; ++v) {
        const auto at = t * static_cast<std::size_t>(spec.vocab) + static_cast<std::size_t>(v);
        ASSERT_NEAR(logits[at], expected[t][static_cast<std::size_t>(v)], 2e-3)
            << split.tp << ' ' << split.pp << ' ' << t;
      }
    }
  }
}

TEST_P(CpuRanks, BitsDependOnTheNumberOfRanksOnly) {
  TinySpec spec = kSpec;
  spec.post_norm = GetParam();
  const TinyModel model(spec);
  const auto tokens = random_tokens(40, spec.vocab);
  for (const int tp : {1, 2, 4}) {
    CpuRunner alone = make_runner(model, {tp, 1}, tp);
    const auto logits = logits_of(alone, tokens, 40);
    for (const int pp : {1, 3}) {
      for (const int threads : {1, 5}) {
        CpuRunner runner = make_runner(model, {tp, pp}, threads);
        EXPECT_EQ(runner.num_threads(), std::max(threads, tp));
        if (threads > 1) {
          std::mt19937 random(static_cast<unsigned>(tp));
          runner.set_tactics(
              testing_support::random_tactics(engines_of(model, {tp, pp}).front().plan(), threads, random));
        }
        for (const std::size_t chunk : {7, 33}) {
          EXPECT_TRUE(same_bits(logits_of(runner, tokens, chunk), logits)) << tp << ' ' << pp << ' ' << threads;
        }
      }
    }
  }
}

TEST(CpuRanks, BlocksAreThoseOfAllRanks) {
  const TinyModel model(kSpec);
  const CpuRunner one = make_runner(model, {}, 1);
  for (const Split& split : {Split{4, 1}, Split{1, 3}, Split{2, 2}}) {
    const CpuRunner runner = make_runner(model, split, 1);
    ASSERT_EQ(runner.shape().kv_groups.size(), one.shape().kv_groups.size());
    for (std::size_t group = 0; group < one.shape().kv_groups.size(); ++group) {
      EXPECT_EQ(runner.shape().kv_groups[group].bytes_per_block, one.shape().kv_groups[group].bytes_per_block);
      EXPECT_EQ(runner.shape().kv_groups[group].window, one.shape().kv_groups[group].window);
    }
  }
}

TEST(CpuRanks, CopiedBlocksServeOnAllRanks) {
  const TinyModel model({.layers = 3, .kv_heads = 4});
  const auto tokens = random_tokens(20, model.spec.vocab);
  const std::vector<BlockId> first = {1, 2};
  const std::vector<BlockId> copied = {5, 6};
  CpuRunner runner = make_runner(model, {2, 3}, 2);
  StepOutputs outputs;
  const SequenceStep prompt{std::span(tokens).first(19), 0, {first}, LogitsMode::kNone};
  runner.step({&prompt, 1}, outputs);
  const BlockCopy copies[] = {{0, KvTier::kDevice, 1, KvTier::kDevice, 5}, {0, KvTier::kDevice, 2, KvTier::kDevice, 6}};
  runner.copy_blocks(copies);
  const auto last_logits = [&](const std::vector<BlockId>& blocks) {
    const SequenceStep last{std::span(tokens).last(1), 19, {blocks}, LogitsMode::kLast};
    runner.step({&last, 1}, outputs);
    return outputs.logits;
  };
  EXPECT_TRUE(same_bits(last_logits(copied), last_logits(first)));
}

TEST(CpuRanks, StepsDoNotAllocate) {
  const TinyModel model(kSpec);
  CpuRunner runner = make_runner(model, {2, 3}, 4);
  const auto tokens = random_tokens(40, model.spec.vocab);
  const std::vector<BlockId> blocks = {0, 1, 2};
  const SequenceStep prompt{tokens, 0, {blocks, blocks, blocks, blocks}, LogitsMode::kAll};
  StepOutputs outputs;
  runner.step({&prompt, 1}, outputs);  // the outputs grow once
  const auto before = testing_support::allocation_count();
  for (int i = 0; i < 3; ++i) runner.step({&prompt, 1}, outputs);
  EXPECT_EQ(testing_support::allocation_count(), before);
}

TEST(CpuRanks, RanksThatAreMissingOrElsewhereAreRefused) {
  const TinyModel model(kSpec);
  const auto refused = [](std::vector<Engine> engines, const std::string& message) {
    try {
      CpuRunner(std::move(engines), {1, nullptr});
      ADD_FAILURE() << "accepted: " << message;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kEngineIncompatible);
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  };
  auto engines = engines_of(model, {2, 2});
  engines.pop_back();
  refused(std::move(engines), "rank0: is rank 0 of 4, expected rank 0 of 3");
  engines = engines_of(model, {2, 2});
  std::swap(engines[1], engines[2]);
  refused(std::move(engines), "rank2: is rank 2 of 4, expected rank 1 of 4");
  engines = engines_of(model, {1, 2});
  engines[1] = std::move(engines_of(TinyModel({.vocab = 51, .layers = 4, .kv_heads = 4}), {1, 2})[1]);
  refused(std::move(engines), "rank1: is from another build than rank0");
  try {
    CpuRunner(std::move(engines_of(model, {2, 1})[0]), {1, nullptr});
    ADD_FAILURE() << "one of two ranks runs alone";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("run together"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace aotllm
