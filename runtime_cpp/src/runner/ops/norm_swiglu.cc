#include "runner/ops.h"
#include "runner/partition.h"
#include "runner/share.h"

namespace aotllm {

void run(const Worker& worker, const NormSwigluOp& op) {
  const StepContext& step = worker.step;
  const cpu::Kernels& kernels = step.kernels;
  const Linear& gate = step.plan.linears[op.gate];  // up has the same rows in each panel
  const cpu::Activations a =
      prepare(worker, {step.space.buffer(op.in), gate.k, op.norm, op.eps, {}, step.batch.rows()}, {op.gate, op.up});
  float* out = step.space.buffer(op.out);
  float* g = worker.own().tile;
  float* u = worker.own().tile_up;
  const auto run_tile = [&](const Tile& tile) {
    const int column = row_of_panel(gate, tile.panel_begin);
    const int width = row_of_panel(gate, tile.panel_end) - column;
    product(worker, op.gate, a, tile, g, width);
    product(worker, op.up, a, tile, u, width);
    for (int row = tile.row_begin; row < tile.row_end; ++row) {
      const std::ptrdiff_t at = std::ptrdiff_t{row - tile.row_begin} * width;
      if (!op.gate_bias.empty()) kernels.add(g + at, op.gate_bias.data() + column, width, g + at);
      if (!op.up_bias.empty()) kernels.add(u + at, op.up_bias.data() + column, width, u + at);
      kernels.act_mul(op.activation, g + at, u + at, width, out + std::ptrdiff_t{row} * gate.n + column);
    }
  };
  share_tiles(worker, gate.panels, step.tactic(op.gate).tile, run_tile);
  worker.barrier();
}

}  // namespace aotllm
