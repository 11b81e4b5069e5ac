#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {

void product(const Worker& worker, int linear, const cpu::Activations& a, const Tile& tile, float* y,
             std::ptrdiff_t y_stride) {
  const StepContext& step = worker.step;
  const Linear& weights = step.plan.linears[linear];
  multiply(step.kernels, weights, a, tile, y, y_stride);
  if (!step.lora.updates(linear)) return;
  const int column = row_of_panel(weights, tile.panel_begin);
  const int width = row_of_panel(weights, tile.panel_end) - column;
  step.lora.expand(step.kernels, linear, {tile.row_begin, tile.row_end, column, width, y, y_stride});
}

}  // namespace aotllm
