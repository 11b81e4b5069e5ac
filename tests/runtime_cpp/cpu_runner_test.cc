#include "aotllm/cpu_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "allocation_counter.h"
#include "aotllm/errors.h"
#include "cpu_sequences.h"
#include "naive_model.h"
#include "random_tactics.h"
#include "tiny_model.h"

namespace aotllm {
namespace {

using testing_support::logits_of;
using testing_support::make_runner;
using testing_support::NaiveModel;
using testing_support::random_tactics;
using testing_support::random_tokens;
using testing_support::run_all;
using testing_support::same_bits;
using testing_support::Sequence;
using testing_support::tables;
using testing_support::TinyModel;
using testing_support::TinySpec;

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
  TinySpec bf16_kv{.kv_dtype = "bf16"};
  TinySpec int16_kv{.kv_dtype = "int16"};
  TinySpec int8_kv{.kv_dtype = "int8"};
  TinySpec int8_gemma = gemma;
  int8_gemma.head_dim = 24;
  int8_gemma.kv_dtype = "int8";
  TinySpec experts{.experts = 5, .top_k = 2};
  TinySpec normalized{
      .layers = 3, .activation = "gelu_tanh", .experts = 9, .top_k = 4, .normalize = true, .dense_layer = 1};
  TinySpec all_experts{
      .vocab = 37, .hidden = 40, .heads = 3, .kv_heads = 3, .intermediate = 19, .experts = 3, .top_k = 3};
  TinySpec one_expert{.intermediate = 130, .experts = 40, .top_k = 1};
  TinySpec block_experts{
      .hidden = 64, .intermediate = 96, .v_format = "q8_0", .experts = 6, .top_k = 2, .expert_format = "q8_0"};
  TinySpec mixed_experts{.hidden = 64, .intermediate = 96, .v_format = "q8_0", .experts = 6, .top_k = 2};
  TinySpec bf16{.hidden = 40, .intermediate = 19, .v_format = "bf16"};
  TinySpec bf16_experts{
      .hidden = 40, .intermediate = 19, .v_format = "bf16", .experts = 6, .top_k = 2, .expert_format = "bf16"};
  TinySpec mixed_bf16_experts{.v_format = "bf16", .experts = 6, .top_k = 2};
  return {{"llama", {}, 2e-5},
          {"bf16", bf16, 3e-3},
          {"bf16_experts", bf16_experts, 3e-3},
          {"experts_of_bf16_and_f32", mixed_bf16_experts, 3e-3},
          {"experts", experts, 2e-5},
          {"normalized_experts", normalized, 2e-5},
          {"all_experts_of_odd_size", all_experts, 2e-5},
          {"one_of_many_experts", one_expert, 2e-5},
          {"experts_in_blocks", block_experts, 2e-3},
          {"experts_of_mixed_formats", mixed_experts, 2e-3},
          {"biased", biased, 2e-5},
          {"gemma", gemma, 2e-5},
          {"unaligned", unaligned, 2e-5},
          {"one_kv_head", one_head, 2e-5},
          {"odd_sizes", odd_sizes, 2e-5},
          {"mixed_formats", mixed, 2e-3},
          {"bf16_kv", bf16_kv, 5e-3},
          {"int16_kv", int16_kv, 1e-3},
          {"int8_kv", int8_kv, 5e-3},
          {"int8_gemma", int8_gemma, 5e-3}};
}

class CpuRunnerCase : public testing::TestWithParam<Case> {};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

INSTANTIATE_TEST_SUITE_P(Models, CpuRunnerCase, testing::ValuesIn(cases()),
                         [](const auto& its) { return its.param.name; });

TEST_P(CpuRunnerCase, AgreesWithTheDefinition) {
  const TinyModel model(GetParam().spec);
  // Of tokens for which no rounding of activations is so close that double precision decides otherwise: one code more
  // or less makes some 0.01 of the logits.
  const auto tokens = random_tokens(70, model.spec.vocab, 4);
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

TEST_P(CpuRunnerCase, BitsDoNotDependOnTactics) {
  const TinyModel model(GetParam().spec);
  const auto tokens = random_tokens(100, model.spec.vocab, 3);
  const Engine engine = Engine::from_bytes(model.engine_bytes(), "tiny.engine");
  CpuRunner runner = make_runner(model, 3);
  const auto expected = logits_of(runner, tokens, 128);
  std::mt19937 random(11);
  for (int trial = 0; trial < 10; ++trial) {
    runner.set_tactics(random_tactics(engine.plan(), 3, random));
    for (const int chunk : {1, 7, 64, 128}) {
      EXPECT_TRUE(same_bits(logits_of(runner, tokens, chunk), expected))
          << "trial " << trial << ", chunks of " << chunk;
    }
  }
  runner.set_tactics(std::string());
  EXPECT_TRUE(same_bits(logits_of(runner, tokens, 128), expected));
}

TEST(CpuRunner, TokensDoNotDependOnTactics) {
  const TinyModel model({.vocab = 300});
  const auto tokens = random_tokens(40, model.spec.vocab, 3);
  const Engine engine = Engine::from_bytes(model.engine_bytes(), "tiny.engine");
  CpuRunner runner = make_runner(model, 4);
  const std::vector<BlockId> blocks[] = {{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}, {12, 13, 14}};
  std::vector<SequenceStep> steps;
  for (int i = 0; i < 5; ++i) {
    SequenceStep& step = steps.emplace_back(SequenceStep{std::span(tokens).first(20 + i), 0, tables(blocks[i])});
    step.sampling.emplace();
    step.sampling->temperature = i % 2 == 0 ? 0.0F : 5.0F;
    step.sampling->seed = static_cast<std::uint64_t>(i);
  }
  StepOutputs outputs;
  runner.step(steps, outputs);
  const std::vector<TokenId> expected = outputs.tokens;
  ASSERT_EQ(expected.size(), 5U);
  std::mt19937 random(12);
  for (int trial = 0; trial < 20; ++trial) {
    runner.set_tactics(random_tactics(engine.plan(), 4, random));
    runner.step(steps, outputs);
    EXPECT_EQ(outputs.tokens, expected) << "trial " << trial;
  }
}

TEST(CpuRunner, TacticsThatDoNotFitAreLeftAsideAndDamagedOnesRefused) {
  CpuRunner runner = make_runner(TinyModel({}), 2);
  runner.set_tactics(
      R"({"version": 1, "device": "a CPU, avx2", "threads": 2, "own_rows": 8, "steps": [], "linears": []})");
  EXPECT_NE(runner.tactics_note().find("tuned on a CPU, avx2, this is "), std::string::npos);
  EXPECT_THROW(runner.set_tactics("{}"), Error);
  runner.set_tactics(std::string());
  EXPECT_EQ(runner.tactics_note(), "");
}

/// Contexts of several ranges: calls of attention are divided among threads by ranges and by heads, and share rows.
TEST(CpuRunner, BitsOfLongContextsDoNotDependOnThreadsChunksOrBatch) {
  const TinySpec one_kv_head{
      .heads = 3, .kv_heads = 1, .max_seq_len = 1024, .max_num_tokens = 1024, .window = 300, .kv_dtype = "int16"};
  const TinySpec two_kv_heads{.heads = 10, .kv_heads = 2, .max_seq_len = 1024, .max_num_tokens = 1024};
  for (const TinySpec& spec : {one_kv_head, two_kv_heads}) {
    const TinyModel model(spec);
    const auto run = [&](int threads, int chunk, std::vector<int> lengths) {
      CpuRunner runner = make_runner(model, threads, 256);
      std::vector<Sequence> batch;
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        batch.push_back({random_tokens(lengths[i], spec.vocab, 20 + static_cast<unsigned>(i)), {}});
        for (int block = 0; block < 64; ++block) batch.back().blocks.push_back(static_cast<int>(i) * 64 + block);
      }
      std::vector<Sequence*> pointers;
      for (Sequence& s : batch) pointers.push_back(&s);
      // The last tokens one by one, so that few rows have a long context.
      for (Sequence* s : pointers) s->tokens.resize(s->tokens.size() - 3);
      run_all(runner, pointers, chunk);
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        const auto all = random_tokens(lengths[i], spec.vocab, 20 + static_cast<unsigned>(i));
        batch[i].tokens = all;
      }
      run_all(runner, pointers, 1);
      return batch.front().logits;
    };
    const auto expected = run(1, 1024, {900});
    ASSERT_EQ(expected.size(), std::size_t{900} * static_cast<std::size_t>(spec.vocab));
    for (const int threads : {2, 3, 5, 16}) {
      EXPECT_TRUE(same_bits(run(threads, threads == 3 ? 1 : 250, {900}), expected)) << threads << " threads";
      EXPECT_TRUE(same_bits(run(threads, 100, {900, 40, 700}), expected)) << threads << " threads, a batch";
    }
  }
}

TEST(CpuRunner, RejectedDraftsLeaveNothingBehind) {
  const TinyModel model({.kv_dtype = "int8"});
  CpuRunner runner = make_runner(model, 2);
  const auto tokens = random_tokens(40, model.spec.vocab, 13);
  const auto expected = logits_of(runner, tokens, 128);
  Sequence sequence{tokens, {20, 21, 22}};
  while (!sequence.finished()) {
    std::vector<TokenId> drafts = random_tokens(4, model.spec.vocab, 50 + sequence.done);
    drafts[0] = tokens[sequence.done];
    StepOutputs outputs;
    runner.step(std::vector<SequenceStep>{{drafts, sequence.done, tables(sequence.blocks), LogitsMode::kAll}}, outputs);
    const auto row = outputs.row(0);  // of the token that is known; the drafts behind it are thrown away
    sequence.logits.insert(sequence.logits.end(), row.begin(), row.end());
    ++sequence.done;
  }
  EXPECT_TRUE(same_bits(sequence.logits, expected));
}

TEST(CpuRunner, BrokenPreconditionsThrowAndLeaveTheRunnerUsable) {
  const TinyModel model({});
  CpuRunner runner = make_runner(model, 2, 4);
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
      {{{{}, 0, {blocks}, last}}, "sequence 0: expected at least 1 token"},
      {{{too_large, 0, {blocks}, last}}, "expected token ids in [0, 50), got 50"},
      {{{negative, 0, {blocks}, last}}, "expected token ids in [0, 50), got -1"},
      {{{ok, -1, {blocks}, last}}, "expected positions in [0, 128), got 3 tokens from -1"},
      {{{ok, 126, {blocks}, last}}, "expected positions in [0, 128), got 3 tokens from 126"},
      {{{ok, INT32_MAX, {blocks}, last}}, "expected positions"},
      {{{many, 0, {nine}, last}}, "expected at most 128 tokens"},
      {{{ok, 62, {blocks}, last}}, "sequence 0, KV group 0: expected a block table of at least 5 blocks, got 4"},
      {{{ok, 0, {}, last}}, "expected a block table of at least 1 blocks, got 0"},
      {{{ok, 0, {bad_block}, last}}, "expected block ids in [0, 4), got 4"},
      {{{ok, 0, {blocks}, last}, {ok, 0, {negative_block}, last}},
       "sequence 1, KV group 0: expected block ids in [0, 4), got -1 at 0"},
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

/// A window group needs no more than the blocks that tokens of the step see: the others are taken away and used again.
TEST_P(CpuRunnerCase, BlocksThatLeftTheWindowAreNotRead) {
  TinySpec spec = GetParam().spec;
  for (const int window : {1, 5, 16, 17, 40}) {
    spec.window = window;
    const TinyModel model(spec);
    const auto tokens = random_tokens(100, spec.vocab, 3);
    CpuRunner runner = make_runner(model, 2);
    const auto expected = logits_of(runner, tokens, 128);
    for (const int chunk : {1, 7, 16}) {
      Sequence sequence{tokens, {3, 2, 9, 0, 7, 5, 8}};
      while (!sequence.finished()) {
        SequenceStep step = sequence.next(chunk);
        const int first_seen = std::max(0, sequence.done - window + 1);
        std::vector<BlockId> ring;
        for (int i = 0; i < 7; ++i) ring.push_back(i < first_seen / 16 ? kNoBlock : 20 + i % 4);
        step.block_tables[1] = ring;
        StepOutputs outputs;
        runner.step({&step, 1}, outputs);
        sequence.logits.insert(sequence.logits.end(), outputs.logits.begin(), outputs.logits.end());
        sequence.done += static_cast<int>(step.tokens.size());

        ring[first_seen / 16] = kNoBlock;  // one that is seen
        EXPECT_THROW(runner.step({&step, 1}, outputs), Error) << "window " << window << " at " << step.start_position;
      }
      EXPECT_TRUE(same_bits(sequence.logits, expected)) << "window " << window << ", chunks of " << chunk;
    }
  }
}

TEST(CpuRunner, StepsDoNotAllocate) {
  const TinyModel model({.bias = true, .qk_norm = true, .post_norm = true});
  CpuRunner runner = make_runner(model, 2);
  const auto tokens = random_tokens(64, model.spec.vocab, 8);
  const std::vector<BlockId> blocks = {0, 1, 2, 3, 4};
  const std::vector<SequenceStep> prompt = {{tokens, 0, {blocks}, LogitsMode::kAll}};
  const std::vector<SequenceStep> decode = {{std::span(tokens).first(1), 64, {blocks}, LogitsMode::kLast}};
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
