#pragma once

#include <string>
#include <vector>

#include "engine/plan.h"

namespace aotllm::cuda {

/// Measured tactics of matrices of one format and shape.
struct MeasuredTactics {
  MatrixFormat format = MatrixFormat::kBf16;
  int n = 0;
  int k = 0;
  std::vector<Tactic> tactics;  ///< by max_rows, ascending
  std::vector<double> seconds;  ///< of each, at max_rows rows
};

/// What `aotllm tune` has measured; goes before the tactics of the plan.
class TacticTable {
 public:
  TacticTable() = default;
  explicit TacticTable(std::vector<MeasuredTactics> entries) : entries_(std::move(entries)) {}

  /// Reads the text of an engine's `tactics.json` (`docs/engine_format.md`); empty text is an empty table. Throws
  /// Error(kEngine).
  static TacticTable parse(const std::string& text);

  /// The tactics for a linear: those measured for its format and shape, else the plan's own.
  const std::vector<Tactic>& find(const Linear& linear) const;

  const std::vector<MeasuredTactics>& entries() const noexcept { return entries_; }

 private:
  std::vector<MeasuredTactics> entries_;
};

/// "bf16", "fp8", …: as plans name formats.
const char* format_name(MatrixFormat format) noexcept;

}  // namespace aotllm::cuda
