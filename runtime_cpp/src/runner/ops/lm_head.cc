#include <algorithm>

#include "runner/ops.h"
#include "runner/partition.h"
#include "runner/share.h"

namespace aotllm {
namespace {

/// What the head reads, for the rows that want just that. It is the same on all ranks.
void write_hidden(const Worker& worker, const LmHeadOp& op, int k) {
  const StepContext& step = worker.step;
  if (!step.is_first_rank()) return;
  const std::span<const std::int32_t> rows = step.batch.hidden_rows();
  const Range share = split(std::ssize(rows), worker.index, worker.count);
  for (std::int64_t i = share.begin; i < share.end; ++i) {
    const float* x = step.space.buffer(op.in) + std::ptrdiff_t{rows[static_cast<std::size_t>(i)]} * k;
    float* y = step.hidden + i * k;
    if (op.norm.empty()) {
      std::copy_n(x, k, y);
    } else {
      step.kernels.rms_norm(x, op.norm.data(), op.eps, k, y);
    }
  }
}

}  // namespace

void run(const Worker& worker, const LmHeadOp& op) {
  const StepContext& step = worker.step;
  const Linear& linear = step.plan.linears[op.linear];
  write_hidden(worker, op, linear.k);
  const std::span<const std::int32_t> rows = step.batch.logit_rows();
  if (rows.empty()) return;
  const int num_rows = static_cast<int>(rows.size());
  const cpu::Activations a =
      prepare(worker, {step.space.buffer(op.in), linear.k, op.norm, op.eps, rows, num_rows}, {op.linear});
  const LinearTactic& tactic = step.tactics.at(op.linear, num_rows);
  float* products = worker.own().tile;  // [rows, width] of the tile
  const auto run_tile = [&](const Tile& tile) {
    const int column = row_of_panel(linear, tile.panel_begin);
    const int width = row_of_panel(linear, tile.panel_end) - column;
    float* y = products;
    multiply(*tactic.kernels, linear, a, tile, y, width);
    for (int row = tile.row_begin; row < tile.row_end; ++row, y += width) {
      if (!op.bias.empty()) step.kernels.add(y, op.bias.data() + column, width, y);
      if (op.softcap > 0.0f) step.kernels.softcap(y, width, op.softcap);
      step.logits.take(worker.thread, row, step.plan.vocab_begin() + column, {y, static_cast<std::size_t>(width)});
    }
  };
  // Panels are split even where there are many rows: the head is more than the caches hold, and nothing follows it.
  share_panels(worker, linear.panels, num_rows, tactic.tile, run_tile);
}

}  // namespace aotllm
