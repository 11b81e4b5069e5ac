#include <algorithm>

#include "runner/ops.h"
#include "runner/partition.h"
#include "runner/share.h"

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
  share_tiles(worker, linear.panels, step.tactic(op.linear).tile, run_tile);
}

/// The products as they are, to where all ranks find them.
void store_product(const Worker& worker, const LinearResidualOp& op, const Linear& linear, const cpu::Activations& a) {
  const StepContext& step = worker.step;
  float* y = step.space.products();  // [rows, n]
  share_tiles(worker, linear.panels, step.tactic(op.linear).tile, [&](const Tile& tile) {
    const std::ptrdiff_t at = std::ptrdiff_t{tile.row_begin} * linear.n + row_of_panel(linear, tile.panel_begin);
    product(worker, op.linear, a, tile, y + at, linear.n);
  });
}

/// y = Σ products of all ranks, in the order of ranks, + bias, for `width` columns of a row; returns where it is.
float* sum_ranks(const StepContext& step, const LinearResidualOp& op, std::int64_t row, int column, int width) {
  const std::ptrdiff_t at = row * step.plan.linears[op.linear].n + column;
  float* y = step.spaces.front()->products() + at;
  for (const Workspace* space : step.spaces.subspan(1)) step.kernels.add(y, space->products() + at, width, y);
  if (!op.bias.empty()) step.kernels.add(y, op.bias.data() + column, width, y);
  return y;
}

/// out = residual + y on all ranks, likewise. `y` is overwritten: out may be the residual.
void add_to_residual(const StepContext& step, const LinearResidualOp& op, std::int64_t row, int column, int width,
                     float* y) {
  const std::ptrdiff_t at = row * step.plan.linears[op.linear].n + column;
  step.kernels.add(step.space.buffer(op.residual) + at, y, width, y);
  for (const Workspace* space : step.spaces) std::copy_n(y, width, space->buffer(op.out) + at);
}

/// out = residual + sum + bias: any part of a row by any thread.
void add_sum(const Worker& worker, const LinearResidualOp& op, int n) {
  constexpr int kColumns = 64;
  const std::int64_t parts = (n + kColumns - 1) / kColumns;
  const Range share = worker.common_share(worker.step.batch.rows() * parts);
  for (std::int64_t at = share.begin; at < share.end;) {
    const std::int64_t first = at % parts;
    const std::int64_t last = std::min(parts, first + share.end - at);
    const int column = static_cast<int>(first) * kColumns;
    const int width = std::min(n, static_cast<int>(last) * kColumns) - column;
    float* y = sum_ranks(worker.step, op, at / parts, column, width);
    add_to_residual(worker.step, op, at / parts, column, width, y);
    at += last - first;
  }
}

/// out = residual + RMSNorm(sum + bias): whole rows.
void add_normed_sum(const Worker& worker, const LinearResidualOp& op, int n) {
  const Range rows = worker.common_share(worker.step.batch.rows());
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    float* y = sum_ranks(worker.step, op, row, 0, n);
    worker.step.kernels.rms_norm(y, op.post_norm.data(), op.eps, n, y);
    add_to_residual(worker.step, op, row, 0, n, y);
  }
}

}  // namespace

void run(const Worker& worker, const LinearResidualOp& op) {
  const StepContext& step = worker.step;
  const Linear& linear = step.plan.linears[op.linear];
  const cpu::Activations a =
      prepare(worker, {step.space.buffer(op.in), linear.k, {}, 0.0f, {}, step.batch.rows()}, {op.linear});
  if (op.post_norm.empty() && !step.has_ranks()) {
    add_product(worker, op, linear, a);
  } else {
    store_product(worker, op, linear, a);
    worker.meet();
    if (op.post_norm.empty()) {
      add_sum(worker, op, linear.n);
    } else {
      add_normed_sum(worker, op, linear.n);
    }
  }
  worker.meet();
}

}  // namespace aotllm
