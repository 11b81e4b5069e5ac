#pragma once

#include <span>
#include <string>

#include "engine/plan.h"
#include "runner/cpu_tactics.h"

namespace aotllm {

/// The CPU, and the ISA of the kernels that it runs: what tactics hold for. "AMD EPYC 9R14, avx512_bf16".
std::string tuned_device(const cpu::Kernels& kernels);

/// "avx512_vnni.32x4": ISA of the products, rows × panels of a tile. `kernels` stands where the tactic has none.
std::string tactic_name(const LinearTactic& tactic, const cpu::Kernels& kernels);

/// An engine's tactics.json for target cpu (`docs/engine_format.md`).
struct TacticsFile {
  std::string device;  ///< tuned_device
  int threads = 0;     ///< that there were
  CpuTactics tactics;
  std::string lacking;  ///< an ISA that it names and this CPU or build lacks; empty = none

  /// Throws Error(kEngine) for a damaged text.
  static TacticsFile parse(const std::string& text);

  /// Why a runner leaves it aside: it was made on another CPU, for another number of threads or for another engine.
  /// Empty = it does not.
  std::string why_unfit(const cpu::Kernels& kernels, int num_threads, std::span<const Plan* const> plans) const;
};

}  // namespace aotllm
