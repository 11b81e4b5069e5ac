#include <algorithm>

#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {

void product(const Worker& worker, int linear, const cpu::Activations& a, const Tile& tile, float* y,
             std::ptrdiff_t y_stride) {
  const StepContext& step = worker.step;
  const Linear& weights = step.plan.linears[linear];
  multiply(*step.tactic(linear).kernels, weights, a, tile, y, y_stride);
  if (!step.lora.updates(linear)) return;
  const int column = row_of_panel(weights, tile.panel_begin);
  const int width = row_of_panel(weights, tile.panel_end) - column;
  for (int row = tile.row_begin; row < tile.row_end; row += kTileRows) {
    const int end = std::min(row + kTileRows, tile.row_end);
    float* first = y + (row - tile.row_begin) * y_stride;
    step.lora.expand(step.kernels, linear, {row, end, column, width, first, y_stride});
  }
}

}  // namespace aotllm
