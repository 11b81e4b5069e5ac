#include "runner/cpu_tactics.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "aotllm/errors.h"
#include "runner/linear.h"
#include "support/cpu_name.h"
#include "support/strings.h"

namespace aotllm {
namespace {

bool have_same_products(const Linear& linear, const cpu::Kernels& a, const cpu::Kernels& b) {
  return std::ranges::all_of(
      linear.segments, [&](const LinearSegment& segment) { return cpu::same_products(segment.weights.format, a, b); });
}

}  // namespace

bool ShapeTactics::is_of(const Linear& linear) const {
  return linear.n == n && linear.k == k && format_of(linear) == format;
}

int default_own_rows(std::span<const Linear> linears, const cpu::Kernels& kernels) {
  const auto is_fast = [&](const Linear& linear) {
    return linear.has_bf16 && cpu::matmul_isa(cpu::Format::kBF16, kernels) == std::string_view("amx");
  };
  return std::ranges::any_of(linears, is_fast) ? 32 : 16;
}

// On an Intel Xeon that does not lend its AMX, VDPBF16PS is slower than two float32 multiply-adds from 4 rows on; AMD's
// Zen 4 has it at full rate (docs/benchmarks.md, "bf16 weights"). One tile for all: tuning has found none that is
// better by more than the noise of either machine.
std::vector<LinearTactic> default_tactics(const Linear& linear, const cpu::Kernels& kernels,
                                          const std::string& vendor) {
  constexpr int kStreamedRows = 3;
  const bool has_slow_dot = vendor == "GenuineIntel" && std::string_view(kernels.isa) == "avx512_bf16";
  const cpu::Kernels* floats = has_slow_dot && linear.has_bf16 ? cpu::kernels_for("avx512_vnni") : nullptr;
  if (floats == nullptr) return {{INT_MAX, TileShape{}, &kernels}};
  return {{kStreamedRows, TileShape{}, &kernels}, {INT_MAX, TileShape{}, floats}};
}

std::vector<const cpu::Kernels*> other_kernels(const Linear& linear, const cpu::Kernels& kernels) {
  std::vector<const cpu::Kernels*> others;
  const auto isa_of = [](const LinearSegment& segment, const cpu::Kernels& its) {
    return std::string_view(cpu::matmul_isa(segment.weights.format, its));
  };
  bool is_lower = false;
  for (const char* isa : cpu::kIsaNames) {
    const bool is_next = std::exchange(is_lower, is_lower || isa == std::string_view(kernels.isa));
    const cpu::Kernels* other = is_next ? cpu::kernels_for(isa) : nullptr;
    if (other == nullptr || !have_same_products(linear, *other, kernels)) continue;
    const cpu::Kernels& before = others.empty() ? kernels : *others.back();
    const auto differs = [&](const LinearSegment& s) { return isa_of(s, *other) != isa_of(s, before); };
    if (std::ranges::any_of(linear.segments, differs)) others.push_back(other);
  }
  return others;
}

LinearTactic PlanTactics::default_tactic(const Linear& linear, int rows, const cpu::Kernels& kernels) {
  return tactic_for(std::span<const LinearTactic>(default_tactics(linear, kernels, cpu_vendor())), rows);
}

PlanTactics::PlanTactics(const Plan& plan, const CpuTactics& tactics, const cpu::Kernels& kernels) {
  const std::string vendor = cpu_vendor();
  for (const Linear& linear : plan.linears) {
    const auto found = std::ranges::find_if(tactics.linears, [&](const ShapeTactics& s) { return s.is_of(linear); });
    if (found == tactics.linears.end() || found->tactics.empty()) {
      tactics_.push_back(default_tactics(linear, kernels, vendor));
      continue;
    }
    std::vector<LinearTactic>& own = tactics_.emplace_back(found->tactics);
    for (LinearTactic& tactic : own) {
      if (tactic.kernels == nullptr) tactic.kernels = &kernels;
      if (have_same_products(linear, *tactic.kernels, kernels)) continue;
      throw Error(ErrorKind::kEngine,
                  cat("tactics.json: kernels of ", tactic.kernels->isa, " for a matrix in ", found->format,
                      " would give other results than those of ", kernels.isa, "; run 'aotllm tune' again"));
    }
  }
}

}  // namespace aotllm
