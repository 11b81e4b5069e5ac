#pragma once

#include <random>
#include <span>
#include <utility>
#include <vector>

#include "engine/plan.h"
#include "kernels.h"
#include "runner/cpu_tactics.h"
#include "runner/linear.h"

namespace aotllm::testing_support {

/// Any of what a runner of up to `threads` threads may be told: threads and tiles by rows, and kernels of any ISA that
/// has the same bits.
inline CpuTactics random_tactics(const Plan& plan, int threads, std::mt19937& random) {
  const auto pick = [&](int least, int most) { return std::uniform_int_distribution(least, most)(random); };
  CpuTactics tactics;
  tactics.own_rows = pick(1, 40);
  tactics.steps = {{pick(1, 8), pick(1, threads)}, {pick(9, 60), pick(1, threads)}, {INT_MAX, pick(1, threads)}};
  for (const Linear& linear : plan.linears) {
    std::vector<const cpu::Kernels*> kernels = other_kernels(linear, cpu::kernels());
    kernels.push_back(nullptr);
    const auto any = [&](int max_rows) {
      const TileShape tile{pick(1, kMaxTileRows), pick(1, kMaxTilePanels)};
      return LinearTactic{max_rows, tile, kernels[static_cast<std::size_t>(pick(0, std::ssize(kernels) - 1))]};
    };
    tactics.linears.push_back({format_of(linear), linear.n, linear.k, {any(pick(1, 20)), any(INT_MAX)}});
  }
  return tactics;
}

}  // namespace aotllm::testing_support
