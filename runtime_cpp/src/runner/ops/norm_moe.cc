#include <algorithm>

#include "runner/expert_rows.h"
#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {
namespace {

/// What it costs to stream a panel of weights, in rows that are multiplied by it.
constexpr std::int64_t kPanelCost = 4;

/// One op on one thread. The steps are called in order by all threads; each ends with a barrier where others read what
/// it wrote. A row's result is a sum over its experts in ascending order, whoever else is in the step.
class NormMoe {
 public:
  NormMoe(const Worker& worker, const NormMoeOp& op)
      : worker_(worker),
        step_(worker.step),
        op_(op),
        gate_(step_.plan.linears[op.gate]),
        up_(step_.plan.linears[op.up]),
        down_(step_.plan.linears[op.down]),
        space_(step_.space.experts()),
        chosen_(worker.own().experts),
        rows_(step_.batch.rows()),
        width_(gate_.k),
        need_float_(gate_.has_float || up_.has_float),
        need_bf16_(gate_.has_bf16 || up_.has_bf16),
        need_block_(gate_.has_block || up_.has_block) {}

  void run() {
    prepare();
    route();
    gather();
    rise();
    fall();
  }

 private:
  /// h = RMSNorm(in), and its codes. A single row is every thread's own; no barrier then.
  void prepare() {
    const bool alone = rows_ == 1;
    normed_ = alone ? worker_.own().row : step_.space.rows();
    const Range share = alone ? Range{0, 1} : split(rows_, worker_.index, worker_.count);
    const float* in = step_.space.buffer(op_.in);
    for (std::int64_t row = share.begin; row < share.end; ++row) {
      float* h = normed_.x + row * width_;
      step_.kernels.rms_norm(in + row * width_, op_.norm.data(), op_.eps, width_, h);
      if (need_bf16_) round(h, row, width_, normed_);
      if (need_block_) quantize(h, row, width_, normed_);
    }
    if (!alone) worker_.barrier();
  }

  /// Logits of all rows, the experts that they choose, and the rows of each expert.
  void route() {
    const int num_experts = op_.num_experts;
    Range share = split(std::int64_t{rows_} * num_experts, worker_.index, worker_.count);
    while (share.begin < share.end) {
      const std::int64_t row = share.begin / num_experts;
      const std::int64_t end = std::min(share.end, (row + 1) * num_experts);
      step_.kernels.dot_rows(op_.router.data() + share.begin % num_experts * width_, normed_.x + row * width_,
                             static_cast<int>(end - share.begin), width_, space_.logits + share.begin);
      share.begin = end;
    }
    worker_.barrier();

    const Range rows = split(rows_, worker_.index, worker_.count);
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      const std::span<const float> logits(space_.logits + row * num_experts, static_cast<std::size_t>(num_experts));
      choose_experts(logits, op_.top_k, op_.normalize, space_.choices + row * op_.top_k,
                     space_.weights + row * op_.top_k);
    }
    worker_.barrier();
    group_by_expert(space_.choices, space_.weights, rows_, op_.top_k, num_experts, chosen_);
  }

  /// A row for each slot. With a single row all slots read that one.
  void gather() {
    if (rows_ == 1) {
      in_ = view(normed_, width_);
      return;
    }
    const ActivationRows& to = space_.in;
    const Range slots = split(std::int64_t{rows_} * op_.top_k, worker_.index, worker_.count);
    for (std::int64_t slot = slots.begin; slot < slots.end; ++slot) {
      const std::int64_t row = chosen_.row[slot];
      if (need_float_) copy(normed_.x, row, to.x, slot, width_);
      if (need_bf16_) copy(normed_.bf16, row, to.bf16, slot, cpu::bf16_stride(width_));
      if (!need_block_) continue;
      copy(normed_.blocks, row, to.blocks, slot, cpu::activation_stride(width_));
    }
    in_ = view(to, width_);
    worker_.barrier();
  }

  /// act(gate · h) ⊙ (up · h) of every slot: panels of all experts in a row, split by what they cost.
  void rise() {
    const int panels = panels_of(op_.neurons);
    std::int64_t total = 0;
    for (int e = 0; e < op_.num_experts; ++e) total += panels * cost(e);
    const Range share = split(total, worker_.index, worker_.count);
    std::int64_t before = 0;
    for (int e = 0; e < op_.num_experts; ++e) {
      const std::int64_t each = cost(e);
      if (each == 0) continue;
      // A panel is the thread's in whose share its first row of work lies.
      const auto panel_at = [&](std::int64_t at) {
        return static_cast<int>(std::clamp<std::int64_t>((at - before + each - 1) / each, 0, panels));
      };
      rise_expert(e, panel_at(share.begin), panel_at(share.end));
      before += panels * each;
    }
    worker_.barrier();

    if (!down_.has_block && !down_.has_bf16) return;
    const Range slots = split(std::int64_t{rows_} * op_.top_k, worker_.index, worker_.count);
    for (std::int64_t slot = slots.begin; slot < slots.end; ++slot) {
      const float* x = space_.gated.x + slot * op_.neurons;
      if (down_.has_bf16) round(x, slot, op_.neurons, space_.gated);
      if (down_.has_block) quantize(x, slot, op_.neurons, space_.gated);
    }
    worker_.barrier();
  }

  void rise_expert(int expert, int panel_begin, int panel_end) {
    float* g = worker_.own().tile;
    float* u = worker_.own().tile_up;
    for_each_expert_tile(expert, panel_begin, panel_end, [&](const Tile& tile, int slot) {
      const cpu::Activations a = rows_from(in_, rows_ == 1 ? 0 : slot, width_);
      const int column = tile.panel_begin * cpu::kPanelRows;
      const int width = std::min(tile.panel_end * cpu::kPanelRows, op_.neurons) - column;
      multiply_expert(op_.gate, expert, a, tile, g, width);
      multiply_expert(op_.up, expert, a, tile, u, width);
      for (int i = 0; i < tile.rows(); ++i) {
        const std::ptrdiff_t at = std::ptrdiff_t{i} * width;
        float* out = space_.gated.x + std::ptrdiff_t{slot + i} * op_.neurons + column;
        step_.kernels.act_mul(op_.activation, g + at, u + at, width, out);
      }
    });
  }

  /// out = residual + Σ weight · down · gated: a thread has columns of its own, of all rows and experts.
  void fall() {
    const cpu::Activations gated = view(space_.gated, op_.neurons);
    const float* residual = step_.space.buffer(op_.residual);
    float* out = step_.space.buffer(op_.out);
    float* y = worker_.own().tile;
    const Range share = split(panels_of(width_), worker_.index, worker_.count);
    for (auto panel = static_cast<int>(share.begin); panel < share.end; panel += kTilePanels) {
      const int panel_end = std::min<int>(panel + kTilePanels, static_cast<int>(share.end));
      const int column = panel * cpu::kPanelRows;
      const int width = std::min(panel_end * cpu::kPanelRows, width_) - column;
      for (int row = 0; row < rows_; ++row) {
        const std::ptrdiff_t at = std::ptrdiff_t{row} * width_ + column;
        std::copy_n(residual + at, width, out + at);
      }
      for (int e = 0; e < op_.num_experts; ++e) {
        for_each_expert_tile(e, panel, panel_end, [&](const Tile& tile, int slot) {
          multiply_expert(op_.down, e, rows_from(gated, slot, op_.neurons), tile, y, width);
          for (int i = 0; i < tile.rows(); ++i) {
            float* sum = out + std::ptrdiff_t{chosen_.row[slot + i]} * width_ + column;
            step_.kernels.add_scaled(sum, chosen_.weight[slot + i], y + std::ptrdiff_t{i} * width, width, sum);
          }
        });
      }
    }
    worker_.barrier();
  }

  /// Of one panel of gate and up; 0 for an expert that nobody chose.
  std::int64_t cost(int expert) const {
    const int rows = chosen_.rows_of(expert);
    return rows == 0 ? 0 : rows + kPanelCost;
  }

  /// Calls visit(tile, slot of its first row): rows of a tile are counted from the expert's first slot.
  template <class Visit>
  void for_each_expert_tile(int expert, int panel_begin, int panel_end, Visit&& visit) const {
    const int rows = chosen_.rows_of(expert);
    for (int panel = panel_begin; panel < panel_end; panel += kTilePanels) {
      for (int row = 0; row < rows; row += kTileRows) {
        visit(Tile{panel, std::min(panel + kTilePanels, panel_end), row, std::min(row + kTileRows, rows)},
              chosen_.first[expert] + row);
      }
    }
  }

  /// Products of the panels of one expert's matrix; `a` begins with the tile's first row.
  void multiply_expert(int linear, int expert, const cpu::Activations& a, const Tile& tile, float* y,
                       std::ptrdiff_t y_stride) const {
    const cpu::Segment& weights = step_.plan.linears[linear].segments[static_cast<std::size_t>(expert)].weights;
    step_.tactics.at(linear, tile.rows())
        .kernels->matmul(weights, a, tile.rows(), tile.panel_begin, tile.panel_end, y, y_stride);
  }

  void quantize(const float* x, std::int64_t row, int k, const ActivationRows& to) const {
    step_.kernels.quantize(x, k, to.blocks + row * cpu::activation_stride(k));
  }

  void round(const float* x, std::int64_t row, int k, const ActivationRows& to) const {
    step_.kernels.to_bf16(x, k, to.bf16 + row * cpu::bf16_stride(k));
  }

  static cpu::Activations view(const ActivationRows& rows, int k) { return {rows.x, k, rows.blocks, rows.bf16}; }

  template <class T>
  static void copy(const T* from, std::int64_t row, T* to, std::int64_t slot, std::ptrdiff_t width) {
    std::copy_n(from + row * width, width, to + slot * width);
  }

  const Worker& worker_;
  const StepContext& step_;
  const NormMoeOp& op_;
  const Linear& gate_;
  const Linear& up_;
  const Linear& down_;
  const ExpertSpace& space_;
  const ExpertRows& chosen_;  ///< this thread's copy
  const int rows_;
  const int width_;  ///< of `in`
  const bool need_float_;
  const bool need_bf16_;
  const bool need_block_;
  ActivationRows normed_;  ///< [rows, width]
  cpu::Activations in_;    ///< [slots, width], or one row
};

}  // namespace

void run(const Worker& worker, const NormMoeOp& op) {
  NormMoe(worker, op).run();
}

}  // namespace aotllm
