#include <algorithm>
#include <cmath>

#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {
namespace {

/// One op on one thread: products and epilogue of units of heads.
class NormQkvRope {
 public:
  NormQkvRope(const Worker& worker, const NormQkvRopeOp& op)
      : worker_(worker),
        step_(worker.step),
        op_(op),
        group_(step_.plan.kv.layers[op.layer].group),
        rotary_half_(static_cast<int>(step_.plan.rope[op.rope].inv_freq.size())),
        tile_(worker.own().tile),
        out_(step_.space.buffer(op.out)) {}

  void run_unit(const QkvUnit& unit, const cpu::Activations& a, int row_begin, int row_end) const {
    for (const QkvUnit::Product& p : unit.products) {
      const Tile tile{p.panel_begin, p.panel_end, row_begin, row_end};
      product(worker_, op_.linear, a, tile, tile_ + p.column, unit.columns);
    }
    for (int row = row_begin; row < row_end; ++row) {
      float* y = tile_ + std::ptrdiff_t{row - row_begin} * unit.columns;  // Q heads, K heads, V heads of the unit
      finish_q(unit, row, y);
      finish_kv(unit, row, y + (unit.q_end - unit.q_begin) * op_.heads.head_dim);
    }
  }

 private:
  void finish_q(const QkvUnit& unit, int row, float* q) const {
    const int head_dim = op_.heads.head_dim;
    for (int head = unit.q_begin; head < unit.q_end; ++head, q += head_dim) {
      add_bias(q, head * head_dim);
      norm_and_rotate(q, op_.q_norm, row);
      std::copy_n(q, head_dim, out_ + std::ptrdiff_t{row} * op_.heads.q_width() + head * head_dim);
    }
  }

  void finish_kv(const QkvUnit& unit, int row, float* k) const {
    const int head_dim = op_.heads.head_dim;
    const int tokens_per_block = step_.plan.kv.tokens_per_block;
    const int position = step_.batch.position(row);
    const BlockId block = step_.batch.block_table(row, group_)[position / tokens_per_block];
    float* v = k + (unit.kv_end - unit.kv_begin) * head_dim;
    for (int head = unit.kv_begin; head < unit.kv_end; ++head, k += head_dim, v += head_dim) {
      const int k_row = op_.heads.q_width() + head * head_dim;
      add_bias(k, k_row);
      add_bias(v, k_row + op_.heads.kv_width());
      norm_and_rotate(k, op_.k_norm, row);
      step_.kernels.store_kv(k, v, head_dim, step_.plan.kv.dtype, step_.kv.k(op_.layer, block, head),
                             step_.kv.v(op_.layer, block, head), position % tokens_per_block, tokens_per_block);
    }
  }

  void add_bias(float* x, int linear_row) const {
    if (!op_.bias.empty()) step_.kernels.add(x, op_.bias.data() + linear_row, op_.heads.head_dim, x);
  }

  void norm_and_rotate(float* x, std::span<const float> norm, int row) const {
    if (!norm.empty()) step_.kernels.rms_norm(x, norm.data(), op_.qk_norm_eps, op_.heads.head_dim, x);
    const std::ptrdiff_t at = std::ptrdiff_t{row} * rotary_half_;
    step_.kernels.rope(x, step_.space.cos(op_.rope) + at, step_.space.sin(op_.rope) + at, rotary_half_);
  }

  const Worker& worker_;
  const StepContext& step_;
  const NormQkvRopeOp& op_;
  const int group_;  ///< of KV blocks
  const int rotary_half_;
  float* const tile_;
  float* const out_;
};

}  // namespace

void compute_rope(const Worker& worker) {
  const StepContext& step = worker.step;
  // From the last thread on: the first ones begin with the embeddings.
  const Range rows = split(step.batch.rows(), worker.count - 1 - worker.index, worker.count);
  for (std::size_t table = 0; table < step.plan.rope.size(); ++table) {
    const RopeTable& rope = step.plan.rope[table];
    const auto half = static_cast<std::int64_t>(rope.inv_freq.size());
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      float* cos = step.space.cos(static_cast<int>(table)) + row * half;
      float* sin = step.space.sin(static_cast<int>(table)) + row * half;
      const auto position = static_cast<float>(step.batch.position(static_cast<int>(row)));
      for (std::int64_t i = 0; i < half; ++i) {
        // The angle is a float32 product, as in the models' reference code; its cosine is correctly rounded.
        const double angle = position * rope.inv_freq[static_cast<std::size_t>(i)];
        cos[i] = static_cast<float>(std::cos(angle)) * rope.attention_factor;
        sin[i] = static_cast<float>(std::sin(angle)) * rope.attention_factor;
      }
    }
  }
}

void run(const Worker& worker, const NormQkvRopeOp& op) {
  const StepContext& step = worker.step;
  const Linear& linear = step.plan.linears[op.linear];
  const int rows = step.batch.rows();
  const cpu::Activations a =
      prepare(worker, {step.space.buffer(op.in), linear.k, op.norm, op.eps, {}, rows}, {op.linear});

  const NormQkvRope task(worker, op);
  const TileShape shape = step.tactic(op.linear).tile;
  const std::vector<QkvUnit>& units = step.units[op.layer];
  if (worker.owns_rows) {
    for (const QkvUnit& unit : units) {
      for_each_row_tile(worker.own_rows(), shape.rows, [&](int begin, int end) { task.run_unit(unit, a, begin, end); });
    }
  } else {
    // Units differ in size and cost: dealt out from the last one, those of K and V being the largest.
    const std::int64_t tiles = row_tiles(rows, shape.rows);
    const std::int64_t items = std::ssize(units) * tiles;
    for (std::int64_t item = worker.next(); item < items; item = worker.next()) {
      const int row_begin = static_cast<int>(item % tiles) * shape.rows;
      const QkvUnit& unit = units[units.size() - 1 - static_cast<std::size_t>(item / tiles)];
      task.run_unit(unit, a, row_begin, std::min(rows, row_begin + shape.rows));
    }
  }
  worker.barrier();
}

}  // namespace aotllm
