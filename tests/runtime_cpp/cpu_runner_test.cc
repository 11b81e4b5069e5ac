#include "aotllm/cpu_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "allocation_counter.h"
#include "aotllm/errors.h"
#include "aotllm/sampler.h"
#include "kernels.h"
#include "naive_model.h"
#include "sampling/row_sampling.h"
#include "tiny_model.h"

namespace aotllm {
namespace {

using testing_support::NaiveModel;
using testing_support::TinyModel;
using testing_support::TinySpec;

/// The same number for each group, none on the host.
KvAllocation device_blocks(std::int32_t count) {
  return {.device_blocks = {count, count, count, count}};
}

CpuRunner make_runner(const TinyModel& model, int num_threads, int num_blocks = 128) {
  CpuRunner runner(Engine::from_bytes(model.engine_bytes(), "tiny.engine"), {num_threads, nullptr});
  runner.allocate_kv(device_blocks(num_blocks));
  return runner;
}

/// The same table for each group.
std::array<std::span<const BlockId>, kMaxKvGroups> tables(std::span<const BlockId> blocks) {
  return {blocks, blocks, blocks, blocks};
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
    return {std::span(tokens).subspan(done, count), done, tables(blocks), LogitsMode::kAll};
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
      {tokens, 0, {a}, LogitsMode::kLast}, {tokens, 0, {b}, LogitsMode::kNone}, {tokens, 0, {c}, LogitsMode::kAll}};
  runner.step(steps, outputs);
  ASSERT_EQ(outputs.rows(), 11);
  const int vocab = model.spec.vocab;
  EXPECT_TRUE(same_bits({outputs.logits.begin(), outputs.logits.begin() + vocab}, {all.end() - vocab, all.end()}));
  EXPECT_TRUE(same_bits({outputs.logits.begin() + vocab, outputs.logits.end()}, all));

  runner.step(std::vector<SequenceStep>{{tokens, 0, {a}, LogitsMode::kNone}}, outputs);
  EXPECT_EQ(outputs.rows(), 0);
}

TEST(CpuRunner, LogitsModesMixInOneStep) {
  const TinyModel model({.window = 20, .kv_dtype = "int8"});
  CpuRunner runner = make_runner(model, 2);
  const auto vocab = static_cast<std::size_t>(model.spec.vocab);
  std::vector<Sequence> sequences;
  for (int i = 0; i < 5; ++i) {
    sequences.push_back({random_tokens(40, model.spec.vocab, 30 + i), {3 * i, 3 * i + 1, 3 * i + 2}});
    run_all(runner, {&sequences.back()}, 128);
  }
  std::mt19937 random(12);
  for (int round = 0; round < 30; ++round) {  // any part of a sequence may run again: it writes what is there
    std::vector<SequenceStep> steps;
    std::vector<float> expected;
    for (const Sequence& s : sequences) {
      const std::size_t start = random() % 40;
      const std::size_t count = 1 + random() % std::min<std::size_t>(20, 40 - start);
      const auto mode = static_cast<LogitsMode>(random() % 3);
      steps.push_back({std::span(s.tokens).subspan(start, count), static_cast<int>(start), tables(s.blocks), mode});
      const std::size_t rows = mode == LogitsMode::kAll ? count : mode == LogitsMode::kLast ? 1 : 0;
      const auto end = s.logits.begin() + static_cast<std::ptrdiff_t>((start + count) * vocab);
      expected.insert(expected.end(), end - static_cast<std::ptrdiff_t>(rows * vocab), end);
    }
    StepOutputs outputs;
    runner.step(steps, outputs);
    ASSERT_TRUE(same_bits(outputs.logits, expected)) << "round " << round;
  }
}

TEST(CpuRunner, SampledTokensAreTheSamplersWhateverIsInTheStep) {
  const TinyModel model({.final_softcap = 1.5f});
  const auto vocab = static_cast<std::size_t>(model.spec.vocab);
  std::vector<std::vector<TokenId>> prompts;
  std::vector<std::vector<BlockId>> blocks;
  std::vector<SamplingParams> params;
  std::vector<TokenId> expected;
  CpuRunner reference = make_runner(model, 1);
  Sampler sampler(model.spec.vocab);
  for (int i = 0; i < 12; ++i) {
    prompts.push_back(random_tokens(1 + i, model.spec.vocab, 70 + i));
    blocks.push_back({i});
    SamplingParams& p = params.emplace_back();
    p.temperature = i % 3 == 0 ? 0.0 : 0.7;
    p.top_k = i % 3 == 1 ? 5 : 0;
    p.top_p = i % 2 == 0 ? 0.9 : 1.0;
    const auto logits = logits_of(reference, prompts.back(), 128);
    LogitsProcessors none;
    expected.push_back(
        sampler.sample(std::span(logits).last(vocab), {.params = p,
                                                       .processors = none,
                                                       .tokens = prompts.back(),
                                                       .num_prompt_tokens = 1,
                                                       .seed = 11,
                                                       .sequence_index = static_cast<std::uint32_t>(i)}));
  }
  for (const int num_threads : {1, 2, 3}) {
    CpuRunner runner = make_runner(model, num_threads);
    EXPECT_TRUE(runner.samples());
    std::vector<SequenceStep> steps;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      SequenceStep& step = steps.emplace_back(SequenceStep{prompts[i], 0, tables(blocks[i]), LogitsMode::kLast});
      RowSampling& row = step.sampling.emplace(row_sampling(params[i]));
      row.seed = 11;
      row.position = static_cast<std::uint32_t>(prompts[i].size());
      row.sequence_index = static_cast<std::uint32_t>(i);
    }
    StepOutputs outputs;
    runner.step(steps, outputs);
    EXPECT_EQ(outputs.tokens, expected) << num_threads << " threads";
    EXPECT_EQ(outputs.rows(), 0);

    steps[4].sampling.reset();  // one for the host among them
    runner.step(steps, outputs);
    std::vector<TokenId> others = expected;
    others.erase(others.begin() + 4);
    EXPECT_EQ(outputs.tokens, others);
    const auto alone = logits_of(reference, prompts[4], 128);
    EXPECT_TRUE(same_bits(outputs.logits, {alone.end() - static_cast<std::ptrdiff_t>(vocab), alone.end()}));
  }
}

TEST(CpuRunner, ProfileCountsOpsAndLeavesResultsAsTheyAre) {
  const TinyModel model({});
  CpuRunner runner = make_runner(model, 2);
  const auto tokens = random_tokens(10, model.spec.vocab, 4);
  const auto expected = logits_of(runner, tokens, 5);
  EXPECT_EQ(runner.profile().steps, 0) << "it is off";
  runner.set_profiling(true);
  EXPECT_TRUE(same_bits(logits_of(runner, tokens, 5), expected));
  const StepProfile profile = runner.profile();
  EXPECT_EQ(profile.steps, 2);
  EXPECT_EQ(profile.threads, 2);
  double seconds = 0.0;
  std::map<std::string, std::int64_t> counts;
  for (const OpProfile& op : profile.ops) {
    counts[op.op] += op.count;
    seconds += op.prepare_seconds + op.compute_seconds + op.wait_seconds;
    EXPECT_EQ(op.bytes > 0, !op.shape.empty()) << op.op;
  }
  const std::map<std::string, std::int64_t> in_plan = {{"embedding", 1},       {"norm_qkv_rope", 2},
                                                       {"paged_attention", 2}, {"linear_residual", 4},
                                                       {"norm_swiglu", 2},     {"lm_head", 1}};
  EXPECT_EQ(counts, in_plan);
  EXPECT_GT(seconds, 0.0);
  EXPECT_LE(seconds, 2 * profile.seconds) << "two threads spend at most the time of the steps";
  runner.set_profiling(false);
  EXPECT_EQ(runner.profile().steps, 0);
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

TEST(CpuRunner, BrokenSetUpThrows) {
  const TinyModel model({});
  const auto engine = [&] { return Engine::from_bytes(model.engine_bytes(), "tiny.engine"); };
  EXPECT_THROW(CpuRunner(engine(), {-1, nullptr}), Error);
  EXPECT_THROW(CpuRunner(engine(), {1 << 20, nullptr}), Error);
  CpuRunner runner(engine(), {1, nullptr});
  StepOutputs outputs;
  const std::vector<TokenId> tokens = {1};
  const std::vector<BlockId> blocks = {0};
  EXPECT_THROW(runner.step(std::vector<SequenceStep>{{tokens, 0, {blocks}}}, outputs), Error) << "no KV memory yet";
  EXPECT_THROW(runner.allocate_kv(device_blocks(0)), Error);
  EXPECT_THROW(runner.allocate_kv(device_blocks(INT32_MAX)), Error) << "2^43 bytes";
  EXPECT_THROW(runner.allocate_kv({.device_blocks = {1}, .host_blocks = {-1}}), Error);
  EXPECT_THROW(runner.allocate_kv({.device_blocks = {1}, .host_blocks = {INT32_MAX}}), Error) << "2^43 bytes";
  EXPECT_EQ(runner.kv_allocation().device_blocks, BlockCounts{});
  runner.allocate_kv({.device_blocks = {2, 7}, .host_blocks = {3}});
  EXPECT_EQ(runner.kv_allocation().device_blocks, BlockCounts{2}) << "the engine has one group";
  EXPECT_EQ(runner.kv_allocation().host_blocks, BlockCounts{3});
  EXPECT_THROW(runner.allocate_kv(device_blocks(2)), Error);

  CpuRunner two_groups(Engine::from_bytes(TinyModel({.window = 5}).engine_bytes(), "tiny.engine"), {1, nullptr});
  EXPECT_THROW(two_groups.allocate_kv({.device_blocks = {1, 0}}), Error) << "every group needs a block";
}

TEST(CpuRunner, CopiesOutOfRangeThrowAndCopyNothing) {
  const TinyModel model({.window = 20});
  CpuRunner runner(Engine::from_bytes(model.engine_bytes(), "tiny.engine"), {1, nullptr});
  runner.allocate_kv({.device_blocks = {4, 2}, .host_blocks = {1, 0}});
  const auto device = KvTier::kDevice;
  const auto host = KvTier::kHost;
  const struct {
    BlockCopy copy;
    const char* reason;
  } broken[] = {
      {{-1, device, 0, device, 1}, "expected a KV group in [0, 2), got -1"},
      {{2, device, 0, device, 1}, "expected a KV group in [0, 2), got 2"},
      {{0, device, 4, device, 1}, "expected device ids in [0, 4) of KV group 0, got 4"},
      {{0, device, 1, device, -1}, "expected device ids in [0, 4) of KV group 0, got -1"},
      {{1, device, 1, device, 2}, "expected device ids in [0, 2) of KV group 1, got 2"},
      {{0, host, 1, device, 0}, "expected host ids in [0, 1) of KV group 0, got 1"},
      {{1, device, 0, host, 0}, "expected host ids in [0, 0) of KV group 1, got 0"},
  };
  const auto tokens = random_tokens(16, model.spec.vocab, 9);
  const std::vector<BlockId> blocks = {0, 1};
  const std::vector<SequenceStep> prompt = {{tokens, 0, tables(blocks), LogitsMode::kNone}};
  const std::vector<SequenceStep> decode = {{std::span(tokens).first(1), 16, tables(blocks), LogitsMode::kLast}};
  StepOutputs outputs;
  runner.step(prompt, outputs);
  runner.step(decode, outputs);
  const auto expected = outputs.logits;
  for (const auto& c : broken) {
    try {
      runner.copy_blocks(std::vector<BlockCopy>{{0, device, 3, device, 0}, c.copy});
      ADD_FAILURE() << "accepted: " << c.reason;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInternal);
      EXPECT_NE(std::string(error.what()).find(c.reason), std::string::npos) << error.what();
    }
  }
  runner.step(decode, outputs);
  EXPECT_TRUE(same_bits(outputs.logits, expected)) << "block 0 is as it was";
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
  const auto device = KvTier::kDevice;
  runner.copy_blocks(
      std::vector<BlockCopy>{{0, device, 11, device, 12}, {1, device, 11, device, 12}});  // 4 of 16 tokens
  Sequence other{random_tokens(30, model.spec.vocab, 7), {10, 11}, 20};
  run_all(runner, {&other}, 128);  // overwrites what follows in the original
  Sequence second{longer, {10, 12, 13}, 20};
  run_all(runner, {&second}, 128);
  const auto offset = static_cast<std::ptrdiff_t>(20) * model.spec.vocab;
  EXPECT_TRUE(same_bits(second.logits, {expected.begin() + offset, expected.end()}));
}

TEST(CpuRunner, BlocksComeBackFromTheHost) {
  const TinyModel model({.window = 16});
  CpuRunner runner(Engine::from_bytes(model.engine_bytes(), "tiny.engine"), {2, nullptr});
  runner.allocate_kv({.device_blocks = {6, 6}, .host_blocks = {2, 1}});
  const auto tokens = random_tokens(48, model.spec.vocab, 5);
  Sequence whole{tokens, {0, 1, 2}};
  run_all(runner, {&whole}, 128);

  const auto device = KvTier::kDevice;
  const auto host = KvTier::kHost;
  runner.copy_blocks(std::vector<BlockCopy>{{0, device, 0, host, 1}, {0, device, 1, host, 0}, {1, device, 1, host, 0}});
  Sequence other{random_tokens(48, model.spec.vocab, 6), {0, 1, 2}};
  run_all(runner, {&other}, 128);
  runner.copy_blocks(std::vector<BlockCopy>{{0, host, 1, device, 4}, {0, host, 0, device, 3}, {1, host, 0, device, 4}});

  const std::vector<BlockId> all = {4, 3, 5};
  const std::vector<BlockId> in_window = {kNoBlock, 4, 5};  // position 32 sees 17 to 32
  const SequenceStep step{std::span(tokens).subspan(32), 32, {all, in_window}, LogitsMode::kAll};
  StepOutputs outputs;
  runner.step({&step, 1}, outputs);
  const auto offset = static_cast<std::ptrdiff_t>(32) * model.spec.vocab;
  EXPECT_TRUE(same_bits(outputs.logits, {whole.logits.begin() + offset, whole.logits.end()}));
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
