#include "runner/cpu_tactics_file.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "aotllm/errors.h"
#include "runner/linear.h"
#include "support/cpu_name.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr int kThreads = 4;

/// What `aotllm tune` writes on `device`; `kernel` for more than 8 rows.
std::string text(const std::string& device, const std::string& kernel = "avx2.64x2", int own_rows = 8) {
  return cat(R"({"version": 1, "device": ")", device, R"(", "threads": 4, "own_rows": )", own_rows, R"(, "steps": [
    {"max_rows": 1, "threads": 2, "seconds": 0.001, "default_seconds": 0.002},
    {"max_rows": 256, "threads": 4, "seconds": 0.1, "default_seconds": 0.1}],
   "linears": [{"format": "q4_1", "n": 64, "k": 32, "tactics": [
    {"max_rows": 8, "kernel": "avx2.32x16", "seconds": 1e-5}, {"max_rows": 256, "kernel": ")",
             kernel, R"(", "seconds": 2e-5}]}]})");
}

Plan plan_of(int n, cpu::Format format) {
  Plan plan;
  Linear& linear = plan.linears.emplace_back();
  linear.n = n;
  linear.k = 32;
  linear.segments.emplace_back().weights.format = format;
  return plan;
}

std::string why_unfit(const std::string& text, int threads = kThreads,
                      const Plan& plan = plan_of(64, cpu::Format::kQ4_1)) {
  const Plan* plans[] = {&plan};
  return TacticsFile::parse(text).why_unfit(cpu::kernels(), threads, plans);
}

TEST(TacticsFile, HoldsWhatWasWritten) {
  const TacticsFile file = TacticsFile::parse(text(tuned_device(cpu::kernels())));
  EXPECT_EQ(file.tactics.own_rows, 8);
  ASSERT_EQ(file.tactics.steps.size(), 2U);
  EXPECT_EQ(file.tactics.steps[0].threads, 2);
  EXPECT_EQ(file.tactics.steps[1].max_rows, 256);
  ASSERT_EQ(file.tactics.linears.size(), 1U);
  const ShapeTactics& shape = file.tactics.linears.front();
  EXPECT_TRUE(shape.is_of(plan_of(64, cpu::Format::kQ4_1).linears.front()));
  EXPECT_FALSE(shape.is_of(plan_of(64, cpu::Format::kQ4_0).linears.front()));
  ASSERT_EQ(shape.tactics.size(), 2U);
  EXPECT_EQ(tactic_name(shape.tactics[1], cpu::kernels()), "avx2.64x2");
  EXPECT_EQ(shape.tactics[1].kernels, cpu::kernels_for("avx2"));
}

TEST(TacticsFile, FitsTheMachineAndEngineThatItWasMadeFor) {
  const std::string here = tuned_device(cpu::kernels());
  EXPECT_EQ(why_unfit(text(here)), "");
  EXPECT_EQ(why_unfit(text("a CPU, avx2")),
            "tuned on a CPU, avx2, this is " + here + "; the defaults are used: run 'aotllm tune' here");
  EXPECT_EQ(why_unfit(text(here), 2),
            "tuned for 4 threads, the engine runs on 2; the defaults are used: run 'aotllm tune' here with "
            "--num-threads 2");
  EXPECT_EQ(
      why_unfit(text(here), kThreads, plan_of(32, cpu::Format::kQ4_1)),
      "made for another engine: this one has no matrix 64x32 q4_1; the defaults are used: run 'aotllm tune' here");
}

TEST(TacticsFile, KernelsThatAreNotThereLeaveItAside) {
  if (cpu::kernels_for("amx") != nullptr) GTEST_SKIP() << "this CPU and this build have all kernels";
  EXPECT_EQ(why_unfit(text(tuned_device(cpu::kernels()), "amx.32x4")),
            "it has kernels for amx, which this build of aotllm lacks; the defaults are used: run 'aotllm tune' here");
}

TEST(TacticsFile, DamagedTextIsRefusedWhereverItWasMade) {
  std::vector<std::string> texts = {"{", "[]", R"({"version": 2})", text("c", "avx2.32x4", 0)};
  for (const char* kernel : {"", "avx2", "avx2.", "avx2.8", "avx2.8x", "avx2.0x4", "avx2.65x4", "avx2.8x17",
                             "avx2.8x4 ", "sse2.8x4", ".8x4", "avx2.-8x4", "avx2.99999999999x4", "8x4"}) {
    texts.push_back(text("c", kernel));
  }
  const std::string right = text("c");
  for (const char* field : {"\"version\": 1, ", "\"device\": \"c\", ", "\"threads\": 4, ", "\"own_rows\": 8, ",
                            "\"seconds\": 0.001, ", ", \"seconds\": 1e-5", "\"n\": 64, "}) {
    std::string without = right;
    without.erase(without.find(field), std::string(field).size());
    texts.push_back(without);
  }
  for (const auto& [before, after] : {std::pair{"\"max_rows\": 256, \"th", "\"max_rows\": 1, \"th"},
                                      {"\"threads\": 2", "\"threads\": 5"},
                                      {"\"max_rows\": 8", "\"max_rows\": 256"},
                                      {"\"n\": 64", "\"n\": 0"}}) {
    std::string changed = right;
    changed.replace(changed.find(before), std::string(before).size(), after);
    texts.push_back(changed);
  }
  for (const std::string& damaged : texts) {
    try {
      TacticsFile::parse(damaged);
      ADD_FAILURE() << "accepted: " << damaged;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kEngine);
      EXPECT_NE(std::string(error.what()).find("run 'aotllm tune' again"), std::string::npos) << error.what();
    }
  }
  EXPECT_NO_THROW(TacticsFile::parse(right));
}

}  // namespace
}  // namespace aotllm
