#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {

void run(const Worker& worker, const LmHeadOp& op) {
  const StepContext& step = worker.step;
  const Linear& linear = step.plan.linears[op.linear];
  const std::span<const std::int32_t> rows = step.batch.logit_rows();
  if (rows.empty()) return;
  const int num_rows = static_cast<int>(rows.size());
  const cpu::Activations a =
      prepare(worker, {step.space.buffer(op.in), linear.k, op.norm, op.eps, rows, num_rows}, {op.linear});
  const auto run_tile = [&](const Tile& tile) {
    const int column = row_of_panel(linear, tile.panel_begin);
    const int width = row_of_panel(linear, tile.panel_end) - column;
    float* y = step.logits + std::ptrdiff_t{tile.row_begin} * linear.n + column;
    multiply(step.kernels, linear, a, tile, y, linear.n);
    for (int row = tile.row_begin; row < tile.row_end; ++row, y += linear.n) {
      if (!op.bias.empty()) step.kernels.add(y, op.bias.data() + column, width, y);
      if (op.softcap > 0.0f) step.kernels.softcap(y, width, op.softcap);
    }
  };
  for_each_tile(linear.panels, num_rows, worker.index, worker.count, run_tile);
}

}  // namespace aotllm
