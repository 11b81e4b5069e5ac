#include "aotllm/cpu_tuner.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/cpu_runner.h"
#include "cpu_sequences.h"
#include "runner/cpu_tactics_file.h"
#include "runner/step_bench.h"
#include "support/strings.h"
#include "tiny_model.h"

namespace aotllm {
namespace {

using testing_support::TinyModel;
using testing_support::TinySpec;

std::string written(const TinyModel& model, const char* name) {
  const auto path = std::filesystem::temp_directory_path() / name;
  const std::vector<std::uint8_t> bytes = model.engine_bytes();
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
  return path.string();
}

/// As `aotllm tune` writes it.
std::string text_of(const CpuTuning& tuning) {
  std::string steps;
  for (const TunedStep& step : tuning.steps) {
    steps += cat(steps.empty() ? "" : ", ", R"({"max_rows": )", step.max_rows, R"(, "threads": )", step.threads,
                 R"(, "seconds": )", step.seconds, R"(, "default_seconds": )", step.default_seconds, "}");
  }
  std::string linears;
  for (const TunedLinear& linear : tuning.linears) {
    std::string tactics;
    for (const TunedLinear::Choice& choice : linear.choices) {
      tactics += cat(tactics.empty() ? "" : ", ", R"({"max_rows": )", choice.max_rows, R"(, "kernel": ")",
                     choice.kernel, R"(", "seconds": )", choice.seconds, "}");
    }
    linears += cat(linears.empty() ? "" : ", ", R"({"format": ")", linear.format, R"(", "n": )", linear.n, R"(, "k": )",
                   linear.k, R"(, "tactics": [)", tactics, "]}");
  }
  return cat(R"({"version": 1, "device": ")", tuning.device, R"(", "threads": )", tuning.threads, R"(, "own_rows": )",
             tuning.own_rows, R"(, "steps": [)", steps, R"(], "linears": [)", linears, "]}");
}

TEST(CpuTuner, WhatItChoosesIsTakenByARunnerAndChangesNoBit) {
  for (const TinySpec& spec : {TinySpec{.hidden = 64, .intermediate = 96, .v_format = "q8_0"},
                               TinySpec{.v_format = "bf16", .experts = 6, .top_k = 2}}) {
    const TinyModel model(spec);
    const std::string file = written(model, "cpu_tuner_test.engine");
    const CpuTuning tuning = tune_cpu(file, {3, 1.0});
    std::filesystem::remove(file);
    EXPECT_EQ(tuning.device, tuned_device(cpu::kernels()));
    EXPECT_EQ(tuning.threads, 3);
    ASSERT_FALSE(tuning.steps.empty());
    int rows = 0;
    for (const TunedStep& step : tuning.steps) {
      EXPECT_GT(step.max_rows, rows);
      EXPECT_GE(step.threads, 1);
      EXPECT_LE(step.threads, 3);
      EXPECT_GT(step.seconds, 0.0);
      rows = step.max_rows;
    }
    CpuRunner runner = testing_support::make_runner(model, 3);
    const auto tokens = testing_support::random_tokens(100, spec.vocab, 3);
    const auto expected = testing_support::logits_of(runner, tokens, 128);
    runner.set_tactics(text_of(tuning));
    EXPECT_EQ(runner.tactics_note(), "");
    EXPECT_TRUE(testing_support::same_bits(testing_support::logits_of(runner, tokens, 128), expected));
  }
}

TEST(CpuTuner, WithoutTimeNothingIsChosen) {
  const std::string file = written(TinyModel({}), "cpu_tuner_short_test.engine");
  const CpuTuning tuning = tune_cpu(file, {2, 1e-9});
  std::filesystem::remove(file);
  EXPECT_TRUE(tuning.steps.empty());
  EXPECT_TRUE(tuning.linears.empty());
  EXPECT_EQ(tuning.own_rows, 16) << "the default";
}

TEST(StepBench, ProfilesEveryLinearThatTheStepMultipliesByAllRows) {
  const TinyModel model({.max_seq_len = 64, .max_num_tokens = 32});
  std::vector<Engine> ranks;
  ranks.push_back(Engine::from_bytes(model.engine_bytes(), "tiny.engine"));
  StepBench bench(std::move(ranks), 2, 512);
  EXPECT_EQ(bench.max_rows(), 32);
  const StepBench::Profile profile = bench.profile(1, {}, 2);
  EXPECT_GT(profile.seconds, 0.0);
  EXPECT_TRUE(profile.shapes.contains("50x32 f32")) << "the head";
  EXPECT_TRUE(profile.shapes.contains("48x32 f32")) << "gate and up";
  EXPECT_TRUE(profile.shapes.contains("32x48 f32")) << "down";
}

}  // namespace
}  // namespace aotllm
