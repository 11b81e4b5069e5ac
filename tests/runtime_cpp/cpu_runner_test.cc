#include "aotllm/cpu_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "allocation_counter.h"
#include "aotllm/errors.h"
#include "kernels.h"
#include "naive_model.h"
#include "tiny_model.h"

namespace aotllm {
namespace {

using testing_support::NaiveModel;
using testing_support::TinyModel;
using testing_support::TinySpec;

CpuRunner make_runner(const TinyModel& model, int num_threads, int num_blocks = 128) {
  CpuRunner runner(Engine::from_bytes(model.engine_bytes(), "tiny.engine"), {num_threads, nullptr});
  runner.allocate_kv(num_blocks);
  return runner;
}

std::vector<TokenId> random_tokens(int count, int vocab, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<TokenId> tokens(count);
  for (TokenId& t : tokens) t = static_cast<TokenId>(random() % vocab);
  return tokens;
}

/// A sequence and its blocks, run chunk by chunk; collects the logits of every token.
struct Sequence {
  std::vector<TokenId> tokens;
  std::vector<BlockId> blocks;
  int done = 0;
  std::vector<float> logits = {};

  bool finished() const { return done == static_cast<int>(tokens.size()); }
  SequenceStep next(int chunk) const {
    const auto count = std::min<std::size_t>(chunk, tokens.size() - done);
    return {std::span(tokens).subspan(done, count), done, blocks, LogitsMode::kAll};
  }
};

/// Runs the sequences side by side in steps of `chunk` tokens each.
void run_all(CpuRunner& runner, std::vector<Sequence*> sequences, int chunk) {
  StepOutputs outputs;
  for (;;) {
    std::erase_if(sequences, [](const Sequence* s) { return s->finished(); });
    if (sequences.empty()) return;
    std::vector<SequenceStep> steps;
    for (const Sequence* s : sequences) steps.push_back(s->next(chunk));
    runner.step(steps, outputs);
    int row = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      for (std::size_t t = 0; t < steps[i].tokens.size(); ++t, ++row) {
        const auto logits = outputs.row(row);
        sequences[i]->logits.insert(sequences[i]->logits.end(), logits.begin(), logits.end());
      }
      sequences[i]->done += static_cast<int>(steps[i].tokens.size());
    }
    ASSERT_EQ(row, outputs.rows());
  }
}

std::vector<float> logits_of(CpuRunner& runner, const std::vector<TokenId>& tokens, int chunk) {
  Sequence sequence{tokens, {3, 2, 9, 0, 7, 5, 8, 1}};
  run_all(runner, {&sequence}, chunk);
  return sequence.logits;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Case {
  const char* name;
  TinySpec spec;
  double tolerance;  ///< of logits whose size is about 1
};

std::vector<Case> cases() {
  TinySpec biased{.bias = true};
  TinySpec gemma{.bias = true,
                 .qk_norm = true,
                 .post_norm = true,
                 .window = 5,
                 .attention_softcap = 2.0f,
                 .final_softcap = 1.5f,
                 .embedding_scale = 5.5f,
                 .activation = "gelu_tanh"};
  TinySpec unaligned{.head_dim = 24, .rotary_half = 6, .one_qkv_segment = true, .bias = true};
  TinySpec one_head{.heads = 4, .kv_heads = 1, .head_dim = 16, .rotary_half = 8};
  TinySpec odd_sizes{.vocab = 37, .hidden = 40, .heads = 3, .kv_heads = 3, .head_dim = 8, .intermediate = 19};
  TinySpec mixed{.hidden = 64, .intermediate = 96, .v_format = "q8_0"};
  TinySpec half_kv{.kv_dtype = "f16"};
  return {{"llama", {}, 2e-5},
          {"biased", biased, 2e-5},
          {"gemma", gemma, 2e-5},
          {"unaligned", unaligned, 2e-5},
          {"one_kv_head", one_head, 2e-5},
          {"odd_sizes", odd_sizes, 2e-5},
          {"mixed_formats", mixed, 2e-3},
          {"f16_kv", half_kv, 5e-3}};
}

class CpuRunnerCase : public testing::TestWithParam<Case> {};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

INSTANTIATE_TEST_SUITE_P(Models, CpuRunnerCase, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CpuRunnerCase, AgreesWithTheDefinition) {
  const TinyModel model(GetParam().spec);
  const auto tokens = random_tokens(70, model.spec.vocab, 3);
  CpuRunner runner = make_runner(model, 2);
  const auto logits = logits_of(runner, tokens, 64);
  const auto expected = NaiveModel(model).forward(tokens);
  double largest = 0;
  double spread = 0;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    for (int i = 0; i < model.spec.vocab; ++i) {
      largest = std::max(largest, std::abs(logits[t * model.spec.vocab + i] - expected[t][i]));
      spread = std::max(spread, std::abs(expected[t][i]));
    }
  }
  EXPECT_LT(largest, GetParam().tolerance);
  EXPECT_GT(spread, 20 * GetParam().tolerance) << "the comparison says nothing about logits as small as the tolerance";
}

TEST_P(CpuRunnerCase, BitsDoNotDependOnChunksThreadsOrBatch) {
  const TinyModel model(GetParam().spec);
  const auto tokens = random_tokens(70, model.spec.vocab, 3);
  CpuRunner reference = make_runner(model, 1);
  const auto expected = logits_of(reference, tokens, 128);

  std::vector<std::vector<TokenId>> prompts;
  std::vector<std::vector<float>> alone;
  for (int i = 0; i < 16; ++i) {
    prompts.push_back(random_tokens(1 + 4 * i, model.spec.vocab, 100 + i));
    alone.push_back(logits_of(reference, prompts[i], 128));
  }
  for (const int num_threads : {1, 2, 3}) {
    CpuRunner runner = make_runner(model, num_threads);
    for (const int chunk : {1, 7, 64}) {
      EXPECT_TRUE(same_bits(logits_of(runner, tokens, chunk), expected))
          << num_threads << " threads, chunks of " << chunk;
    }
    for (const int chunk : {1, 7}) {
      std::vector<Sequence> batch;
      std::vector<Sequence*> pointers;
      for (int i = 0; i < 16; ++i) batch.push_back({prompts[i], {i, i + 16, i + 32, i + 48}});
      for (Sequence& s : batch) pointers.push_back(&s);
      run_all(runner, pointers, chunk);
      for (int i = 0; i < 16; ++i) {
        EXPECT_TRUE(same_bits(batch[i].logits, alone[i]))
            << num_threads << " threads, chunks of " << chunk << ", prompt " << i;
      }
    }
  }
}

TEST(CpuRunner, LogitsModes) {
  const TinyModel model({});
  CpuRunner runner = make_runner(model, 2);
  const auto tokens = random_tokens(10, model.spec.vocab, 4);
  const auto all = logits_of(runner, tokens, 128);
  const std::vector<BlockId> a = {0};
  const std::vector<BlockId> b = {1};
  const std::vector<BlockId> c = {2};
  StepOutputs outputs;
  const std::vector<SequenceStep> steps = {
      {tokens, 0, a, LogitsMode::kLast}, {tokens, 0, b, LogitsMode::kNone}, {tokens, 0, c, LogitsMode::kAll}};
  runner.step(steps, outputs);
  ASSERT_EQ(outputs.rows(), 11);
  const int vocab = model.spec.vocab;
  EXPECT_TRUE(same_bits({outputs.logits.begin(), outputs.logits.begin() + vocab}, {all.end() - vocab, all.end()}));
  EXPECT_TRUE(same_bits({outputs.logits.begin() + vocab, outputs.logits.end()}, all));

  runner.step(std::vector<SequenceStep>{{tokens, 0, a, LogitsMode::kNone}}, outputs);
  EXPECT_EQ(outputs.rows(), 0);
}

TEST(CpuRunner, BrokenPreconditionsThrowAndLeaveTheRunnerUsable) {
  const TinyModel model({});
  CpuRunner runner = make_runner(model, 2, 4);
  ASSERT_EQ(runner.num_blocks(), 4);
  const std::vector<BlockId> blocks = {0, 1, 2, 3};
  const std::vector<TokenId> ok = {1, 2, 3};
  const auto expected = logits_of(runner, {1, 2}, 2);
  const std::vector<BlockId> bad_block = {4};
  const std::vector<BlockId> negative_block = {-1};
  const std::vector<TokenId> too_large = {50};
  const std::vector<TokenId> negative = {-1};
  const std::vector<TokenId> many(129, 1);
  const std::vector<BlockId> nine(9, 0);
  const auto last = LogitsMode::kLast;
  const struct {
    std::vector<SequenceStep> steps;
    const char* reason;
  } broken[] = {
      {{}, "expected at least 1 token, got none"},
      {{{{}, 0, blocks, last}}, "sequence 0: expected at least 1 token"},
      {{{too_large, 0, blocks, last}}, "expected token ids in [0, 50), got 50"},
      {{{negative, 0, blocks, last}}, "expected token ids in [0, 50), got -1"},
      {{{ok, -1, blocks, last}}, "expected positions in [0, 128), got 3 tokens from -1"},
      {{{ok, 126, blocks, last}}, "expected positions in [0, 128), got 3 tokens from 126"},
      {{{ok, INT32_MAX, blocks, last}}, "expected positions"},
      {{{many, 0, nine, last}}, "expected at most 128 tokens"},
      {{{ok, 62, blocks, last}}, "expected a block table of at least 5 blocks, got 4"},
      {{{ok, 0, {}, last}}, "expected a block table of at least 1 blocks, got 0"},
      {{{ok, 0, bad_block, last}}, "expected block ids in [0, 4), got 4"},
      {{{ok, 0, blocks, last}, {ok, 0, negative_block, last}}, "sequence 1: expected block ids in [0, 4), got -1"},
  };
  StepOutputs outputs;
  for (const auto& c : broken) {
    try {
      runner.step(c.steps, outputs);
      ADD_FAILURE() << "accepted: " << c.reason;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInternal);
      EXPECT_NE(std::string(error.what()).find(c.reason), std::string::npos) << error.what();
    }
  }
  EXPECT_TRUE(same_bits(logits_of(runner, {1, 2}, 2), expected));
}

TEST(CpuRunner, BrokenSetUpThrows) {
  const TinyModel model({});
  const auto engine = [&] { return Engine::from_bytes(model.engine_bytes(), "tiny.engine"); };
  EXPECT_THROW(CpuRunner(engine(), {-1, nullptr}), Error);
  EXPECT_THROW(CpuRunner(engine(), {1 << 20, nullptr}), Error);
  CpuRunner runner(engine(), {1, nullptr});
  StepOutputs outputs;
  const std::vector<TokenId> tokens = {1};
  const std::vector<BlockId> blocks = {0};
  EXPECT_THROW(runner.step(std::vector<SequenceStep>{{tokens, 0, blocks}}, outputs), Error) << "no KV memory yet";
  EXPECT_THROW(runner.allocate_kv(0), Error);
  EXPECT_THROW(runner.allocate_kv(INT32_MAX), Error) << "2^43 bytes";
  EXPECT_EQ(runner.num_blocks(), 0);
  runner.allocate_kv(2);
  EXPECT_EQ(runner.num_blocks(), 2);
  EXPECT_THROW(runner.allocate_kv(2), Error);
  EXPECT_THROW(runner.copy_block(0, 2), Error);
  EXPECT_THROW(runner.copy_block(-1, 0), Error);
}

TEST(CpuRunner, CopiedBlockServesAnotherSequence) {
  const TinyModel model({.window = 20});
  CpuRunner runner = make_runner(model, 2);
  const auto prefix = random_tokens(20, model.spec.vocab, 5);
  auto longer = prefix;
  for (const TokenId t : random_tokens(15, model.spec.vocab, 6)) longer.push_back(t);
  const auto expected = logits_of(runner, longer, 128);

  Sequence first{prefix, {10, 11}};
  run_all(runner, {&first}, 128);
  runner.copy_block(11, 12);  // partly filled: 4 of 16 tokens
  Sequence other{random_tokens(30, model.spec.vocab, 7), {10, 11}, 20};
  run_all(runner, {&other}, 128);  // overwrites what follows in the original
  Sequence second{longer, {10, 12, 13}, 20};
  run_all(runner, {&second}, 128);
  const auto offset = static_cast<std::ptrdiff_t>(20) * model.spec.vocab;
  EXPECT_TRUE(same_bits(second.logits, {expected.begin() + offset, expected.end()}));
}

TEST(CpuRunner, StepsDoNotAllocate) {
  const TinyModel model({.bias = true, .qk_norm = true, .post_norm = true});
  CpuRunner runner = make_runner(model, 2);
  const auto tokens = random_tokens(64, model.spec.vocab, 8);
  const std::vector<BlockId> blocks = {0, 1, 2, 3, 4};
  const std::vector<SequenceStep> prompt = {{tokens, 0, blocks, LogitsMode::kAll}};
  const std::vector<SequenceStep> decode = {{std::span(tokens).first(1), 64, blocks, LogitsMode::kLast}};
  StepOutputs outputs;
  runner.step(prompt, outputs);  // the outputs grow once
  const auto before = testing_support::allocation_count();
  for (int i = 0; i < 3; ++i) {
    runner.step(prompt, outputs);
    runner.step(decode, outputs);
  }
  EXPECT_EQ(testing_support::allocation_count(), before);
  const std::vector<int> proof(3);
  EXPECT_GT(testing_support::allocation_count(), before) << "the counter counts";
}

}  // namespace
}  // namespace aotllm
