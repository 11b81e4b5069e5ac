#include "runner/cpu_tactics.h"

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "aotllm/errors.h"
#include "runner/linear.h"

namespace aotllm {
namespace {

Linear linear(int n, int k, const std::vector<cpu::Format>& formats) {
  Linear linear;
  linear.n = n;
  linear.k = k;
  for (const cpu::Format format : formats) {
    linear.segments.emplace_back().weights.format = format;
    (format == cpu::Format::kBF16 ? linear.has_bf16 : linear.has_block) = true;
  }
  return linear;
}

/// Kernels that are only asked for their name.
cpu::Kernels named(const char* isa) {
  cpu::Kernels kernels{};
  kernels.isa = isa;
  return kernels;
}

std::vector<std::string> names(const std::vector<const cpu::Kernels*>& kernels) {
  std::vector<std::string> names;
  for (const cpu::Kernels* each : kernels) names.emplace_back(each->isa);
  return names;
}

TEST(CpuTactics, TheFirstThatHasRoomHoldsAndTheLastHoldsForMore) {
  const std::vector<StepTactic> steps = {{1, 4}, {16, 8}};
  const auto threads = [&](int rows) { return tactic_for(std::span<const StepTactic>(steps), rows).threads; };
  EXPECT_EQ(threads(1), 4);
  EXPECT_EQ(threads(2), 8);
  EXPECT_EQ(threads(16), 8);
  EXPECT_EQ(threads(4096), 8);
}

TEST(CpuTactics, FormatsOfALinearComeOnceInOrder) {
  using enum cpu::Format;
  EXPECT_EQ(shape_of(linear(960, 576, {kQ5_0, kQ5_0, kQ8_0})), "960x576 q5_0/q8_0");
  EXPECT_EQ(format_of(linear(1, 1, {kQ8_F32, kQ8_0})), "q8_f32/q8_0") << "no name is lost that begins another";
}

TEST(CpuTactics, Bf16WithoutAmxOnIntelIsMultipliedInFloat32) {
  if (cpu::kernels_for("avx512_vnni") == nullptr) GTEST_SKIP() << "this CPU has no avx512_vnni";
  const cpu::Kernels bf16 = named("avx512_bf16");
  const Linear weights = linear(64, 32, {cpu::Format::kBF16});
  const auto isa = [&](const cpu::Kernels& kernels, const char* vendor, int rows, const Linear& of) {
    return std::string(
        tactic_for(std::span<const LinearTactic>(default_tactics(of, kernels, vendor)), rows).kernels->isa);
  };
  EXPECT_EQ(isa(bf16, "GenuineIntel", 1, weights), "avx512_bf16");
  EXPECT_EQ(isa(bf16, "GenuineIntel", 4, weights), "avx512_vnni");
  EXPECT_EQ(isa(bf16, "AuthenticAMD", 4, weights), "avx512_bf16");
  EXPECT_EQ(isa(bf16, "GenuineIntel", 4, linear(64, 32, {cpu::Format::kQ4_1})), "avx512_bf16");
  EXPECT_EQ(isa(named("amx"), "GenuineIntel", 4, weights), "amx") << "its products are others";
  EXPECT_EQ(isa(named("avx512"), "GenuineIntel", 4, weights), "avx512");
}

TEST(CpuTactics, RowsAreAThreadsOwnLaterWhereProductsAreFast) {
  const Linear bf16 = linear(64, 32, {cpu::Format::kBF16});
  const Linear q4_1 = linear(64, 32, {cpu::Format::kQ4_1});
  EXPECT_EQ(default_own_rows(std::vector<Linear>{q4_1, bf16}, named("amx")), 32);
  EXPECT_EQ(default_own_rows(std::vector<Linear>{q4_1}, named("amx")), 16);
  EXPECT_EQ(default_own_rows(std::vector<Linear>{q4_1, bf16}, named("avx512_bf16")), 16);
}

TEST(CpuTactics, OtherKernelsAreOfLowerIsasWithTheSameBitsAndOtherCode) {
  if (cpu::kernels_for("avx512_vnni") == nullptr || cpu::kernels_for("avx512") == nullptr) {
    GTEST_SKIP() << "this CPU or this build has no avx512_vnni";
  }
  using enum cpu::Format;
  using Names = std::vector<std::string>;
  const auto others = [](const char* isa, const std::vector<cpu::Format>& formats) {
    return names(other_kernels(linear(64, 32, formats), named(isa)));
  };
  EXPECT_EQ(others("avx512_bf16", {kBF16}), (Names{"avx512_vnni", "avx2"}));
  EXPECT_EQ(others("avx512_bf16", {kQ4_1}), (Names{"avx512", "avx2"}));
  EXPECT_EQ(others("avx512_bf16", {kF32}), (Names{"avx2"}));
  EXPECT_EQ(others("avx512_vnni", {kQ4_1, kBF16}), (Names{"avx512", "avx2"}));
  EXPECT_EQ(others("avx512", {kQ4_1}), (Names{"avx2"})) << "none that is above";
  EXPECT_EQ(others("avx2", {kQ4_1}), Names{});
  EXPECT_EQ(others("amx", {kBF16}), Names{}) << "its sums have another order";
  EXPECT_EQ(others("amx", {kQ4_1}), (Names{"avx512", "avx2"}));
}

TEST(CpuTactics, KernelsThatChangeResultsAreRefused) {
  const cpu::Kernels amx = named("amx");
  const cpu::Kernels bf16 = named("avx512_bf16");
  Plan plan;
  plan.linears.push_back(linear(64, 32, {cpu::Format::kBF16}));
  CpuTactics tactics;
  tactics.linears.push_back({"bf16", 64, 32, {{INT_MAX, TileShape{}, &bf16}}});
  EXPECT_THROW(PlanTactics(plan, tactics, amx), Error);
  EXPECT_EQ(PlanTactics(plan, tactics, bf16).at(0, 1).kernels, &bf16);
  tactics.linears.front().k = 64;
  EXPECT_EQ(PlanTactics(plan, tactics, amx).at(0, 1).kernels, &amx) << "of another shape: the default holds";
}

}  // namespace
}  // namespace aotllm
