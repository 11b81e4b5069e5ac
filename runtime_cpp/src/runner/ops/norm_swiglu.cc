#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {

void run(const Worker& worker, const NormSwigluOp& op) {
  const StepContext& step = worker.step;
  const cpu::Kernels& kernels = step.kernels;
  const Linear& gate = step.plan.linears[op.gate];
  const Linear& up = step.plan.linears[op.up];  // the same rows in each panel as gate
  const cpu::Activations a = prepare(worker, {step.space.buffer(op.in), gate.k, op.norm, op.eps, {}, step.batch.rows()},
                                     gate.has_float || up.has_float, gate.has_block || up.has_block);
  float* out = step.space.buffer(op.out);
  float* g = worker.own().tile;
  float* u = worker.own().tile_up;
  for_each_tile(gate.panels, step.batch.rows(), worker.index, worker.count,
                [&](int panel_begin, int panel_end, int row_begin, int row_end) {
                  const int column = row_of_panel(gate, panel_begin);
                  const int width = row_of_panel(gate, panel_end) - column;
                  const cpu::Activations tile = rows_from(a, row_begin, gate.k);
                  multiply(kernels, gate, tile, row_end - row_begin, panel_begin, panel_end, g, width);
                  multiply(kernels, up, tile, row_end - row_begin, panel_begin, panel_end, u, width);
                  for (int row = row_begin; row < row_end; ++row) {
                    const std::ptrdiff_t at = std::ptrdiff_t{row - row_begin} * width;
                    if (!op.gate_bias.empty()) kernels.add(g + at, op.gate_bias.data() + column, width, g + at);
                    if (!op.up_bias.empty()) kernels.add(u + at, op.up_bias.data() + column, width, u + at);
                    kernels.act_mul(op.activation, g + at, u + at, width, out + std::ptrdiff_t{row} * gate.n + column);
                  }
                });
  worker.barrier();
}

}  // namespace aotllm
