#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {
namespace {

/// out = residual + W · in + bias, tile by tile.
void add_product(const Worker& worker, const LinearResidualOp& op, const Linear& linear, const cpu::Activations& a) {
  const StepContext& step = worker.step;
  const float* residual = step.space.buffer(op.residual);
  float* out = step.space.buffer(op.out);
  float* y = worker.own().tile;
  const auto run_tile = [&](const Tile& tile) {
    const int column = row_of_panel(linear, tile.panel_begin);
    const int width = row_of_panel(linear, tile.panel_end) - column;
    product(worker, op.linear, a, tile, y, width);
    for (int row = tile.row_begin; row < tile.row_end; ++row) {
      float* product = y + std::ptrdiff_t{row - tile.row_begin} * width;
      const std::ptrdiff_t at = std::ptrdiff_t{row} * linear.n + column;
      if (!op.bias.empty()) step.kernels.add(product, op.bias.data() + column, width, product);
      step.kernels.add(residual + at, product, width, out + at);
    }
  };
  for_each_tile(linear.panels, step.batch.rows(), worker.index, worker.count, run_tile);
}

/// out = residual + RMSNorm(W · in + bias): the norm needs whole rows, hence a barrier between.
void add_normed_product(const Worker& worker, const LinearResidualOp& op, const Linear& linear,
                        const cpu::Activations& a) {
  const StepContext& step = worker.step;
  const float* residual = step.space.buffer(op.residual);
  float* out = step.space.buffer(op.out);
  float* y = step.space.unnormalized();  // [rows, n]
  for_each_tile(linear.panels, step.batch.rows(), worker.index, worker.count, [&](const Tile& tile) {
    const std::ptrdiff_t at = std::ptrdiff_t{tile.row_begin} * linear.n + row_of_panel(linear, tile.panel_begin);
    product(worker, op.linear, a, tile, y + at, linear.n);
  });
  worker.barrier();

  const Range rows = split(step.batch.rows(), worker.index, worker.count);
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    const std::int64_t at = row * linear.n;
    if (!op.bias.empty()) step.kernels.add(y + at, op.bias.data(), linear.n, y + at);
    step.kernels.rms_norm(y + at, op.post_norm.data(), op.eps, linear.n, y + at);
    step.kernels.add(residual + at, y + at, linear.n, out + at);
  }
}

}  // namespace

void run(const Worker& worker, const LinearResidualOp& op) {
  const StepContext& step = worker.step;
  const Linear& linear = step.plan.linears[op.linear];
  const cpu::Activations a =
      prepare(worker, {step.space.buffer(op.in), linear.k, {}, 0.0f, {}, step.batch.rows()}, {op.linear});
  if (op.post_norm.empty()) {
    add_product(worker, op, linear, a);
  } else {
    add_normed_product(worker, op, linear, a);
  }
  worker.barrier();
}

}  // namespace aotllm
