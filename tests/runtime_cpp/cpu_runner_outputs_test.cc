#include "aotllm/cpu_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "aotllm/sampler.h"
#include "cpu_sequences.h"
#include "sampling/row_sampling.h"
#include "tiny_model.h"

namespace aotllm {
namespace {

using testing_support::logits_of;
using testing_support::make_runner;
using testing_support::random_tokens;
using testing_support::run_all;
using testing_support::same_bits;
using testing_support::Sequence;
using testing_support::tables;
using testing_support::TinyModel;

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

}  // namespace
}  // namespace aotllm
