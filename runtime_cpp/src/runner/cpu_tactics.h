#pragma once

#include <climits>
#include <span>
#include <string>
#include <vector>

#include "engine/plan.h"
#include "kernels.h"
#include "runner/partition.h"

// What target cpu may choose by machine without changing a result: who computes a value, and by which of the kernels
// that compute it alike.

namespace aotllm {

/// How a linear is multiplied in steps of at most `max_rows` rows.
struct LinearTactic {
  int max_rows = INT_MAX;
  TileShape tile;
  const cpu::Kernels* kernels = nullptr;  ///< of the products; null = those of the runner
};

/// How many threads run steps of at most `max_rows` rows.
struct StepTactic {
  int max_rows = INT_MAX;
  int threads = INT_MAX;  ///< of all ranks together; at most those that there are
};

/// Linears of one format and shape.
struct ShapeTactics {
  std::string format;  ///< format_of
  int n = 0;
  int k = 0;
  std::vector<LinearTactic> tactics;  ///< by max_rows, ascending; the last one holds for all more rows, too

  bool is_of(const Linear& linear) const;
};

struct CpuTactics {
  /// With as many rows for each thread, they are its own (`Worker::owns_rows`); 0 = default_own_rows
  int own_rows = 0;
  std::vector<StepTactic> steps;      ///< by max_rows, ascending, likewise; empty = all threads
  std::vector<ShapeTactics> linears;  ///< others have default_tactics
};

/// The tactic for so many rows.
template <class Tactic>
const Tactic& tactic_for(std::span<const Tactic> tactics, int rows) {
  for (const Tactic& tactic : tactics) {
    if (rows <= tactic.max_rows) return tactic;
  }
  return tactics.back();
}

/// Weights are then read by all threads, and the time that takes is little beside that of the products, unless those
/// are the fast ones of AMX (docs/benchmarks.md, "Tuning").
int default_own_rows(std::span<const Linear> linears, const cpu::Kernels& kernels);

/// The table that decides until somebody tunes, of a CPU of `vendor` whose best kernels are `kernels`.
std::vector<LinearTactic> default_tactics(const Linear& linear, const cpu::Kernels& kernels, const std::string& vendor);

/// Kernels whose products of `linear` have the same bits as those of `kernels` and other code: of lower ISAs.
std::vector<const cpu::Kernels*> other_kernels(const Linear& linear, const cpu::Kernels& kernels);

/// The tactics of a plan's linears.
class PlanTactics {
 public:
  /// Throws Error(kEngine) where `tactics` names kernels for a linear whose results differ from those of `kernels`.
  PlanTactics(const Plan& plan, const CpuTactics& tactics, const cpu::Kernels& kernels);

  /// What a linear has in steps of `rows` rows until somebody tunes, on this CPU.
  static LinearTactic default_tactic(const Linear& linear, int rows, const cpu::Kernels& kernels);

  /// Kernels are never null.
  const LinearTactic& at(int linear, int rows) const noexcept {
    return tactic_for(std::span<const LinearTactic>(tactics_[static_cast<std::size_t>(linear)]), rows);
  }

 private:
  std::vector<std::vector<LinearTactic>> tactics_;  ///< by linear; never empty
};

}  // namespace aotllm
