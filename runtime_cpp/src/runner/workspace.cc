#include "runner/workspace.h"

#include <algorithm>

#include "runner/partition.h"

namespace aotllm {
namespace {

/// Hands out 64-byte aligned pieces of memory in order; without memory it only counts.
class Carver {
 public:
  explicit Carver(std::uint8_t* base) : base_(base) {}

  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t at = used_;
    used_ += (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }

  std::size_t used() const noexcept { return static_cast<std::size_t>(used_); }

 private:
  std::uint8_t* base_;
  std::int64_t used_ = 0;
};

/// The quantized form alone.
ActivationRows take_codes(Carver& carver, std::int64_t rows, std::int64_t k) {
  ActivationRows r;
  r.q = carver.take<std::int8_t>(rows * k);
  r.scales = carver.take<float>(rows * (k / cpu::kActivationBlock));
  r.sums = carver.take<std::int32_t>(rows * (k / 16));
  return r;
}

ActivationRows take_rows(Carver& carver, std::int64_t rows, std::int64_t k) {
  ActivationRows r = take_codes(carver, rows, k);
  r.x = carver.take<float>(rows * k);
  return r;
}

/// The most that any norm_moe of a plan needs.
struct ExpertSizes {
  std::int64_t num_experts = 0;
  std::int64_t top_k = 0;
  std::int64_t in_floats = 0;  ///< floats of a slot that some op gathers
  std::int64_t in_codes = 0;
  std::int64_t gated = 0;  ///< floats of a slot
  std::int64_t gated_codes = 0;

  explicit ExpertSizes(const Plan& plan) {
    for (const Op& op : plan.ops) {
      if (const auto* moe = std::get_if<NormMoeOp>(&op)) add(plan, *moe);
    }
  }

  void add(const Plan& plan, const NormMoeOp& op) {
    const Linear& gate = plan.linears[op.gate];
    const Linear& up = plan.linears[op.up];
    const auto raise = [](std::int64_t& most, std::int64_t value) { most = std::max(most, value); };
    raise(num_experts, op.num_experts);
    raise(top_k, op.top_k);
    if (gate.has_float || up.has_float) raise(in_floats, gate.k);
    if (gate.has_block || up.has_block) raise(in_codes, gate.k);
    raise(gated, op.neurons);
    if (plan.linears[op.down].has_block) raise(gated_codes, op.neurons);
  }

  /// Of `slots` rows.
  static ActivationRows take(Carver& carver, std::int64_t slots, std::int64_t floats, std::int64_t codes) {
    ActivationRows rows = take_codes(carver, slots, codes);
    if (floats > 0) rows.x = carver.take<float>(slots * floats);
    return rows;
  }

  ExpertSpace take(Carver& carver, std::int64_t rows) const {
    ExpertSpace space;
    if (num_experts == 0) return space;
    space.logits = carver.take<float>(rows * num_experts);
    space.choices = carver.take<std::int32_t>(rows * top_k);
    space.weights = carver.take<float>(rows * top_k);
    space.in = take(carver, rows * top_k, in_floats, in_codes);
    space.gated = take(carver, rows * top_k, gated, gated_codes);
    return space;
  }

  ExpertRows take_lists(Carver& carver, std::int64_t rows) const {
    if (num_experts == 0) return {};
    return {carver.take<std::int32_t>(num_experts + 1), carver.take<std::int32_t>(rows * top_k),
            carver.take<float>(rows * top_k)};
  }
};

}  // namespace

Workspace::Workspace(const Plan& plan, const std::vector<std::vector<QkvUnit>>& units, int num_threads) {
  std::int64_t widest_input = plan.hidden_size;
  for (const Linear& linear : plan.linears) widest_input = std::max<std::int64_t>(widest_input, linear.k);
  std::int64_t tile_width = kTileWidth;
  for (const auto& layer : units) {
    for (const QkvUnit& unit : layer) tile_width = std::max<std::int64_t>(tile_width, unit.columns);
  }
  std::int64_t widest_product = 0;
  for (const Op& op : plan.ops) {
    const auto* linear = std::get_if<LinearResidualOp>(&op);
    if (linear != nullptr && (linear->all_reduce || !linear->post_norm.empty())) {
      widest_product = std::max<std::int64_t>(widest_product, plan.linears[linear->linear].n);
    }
  }
  const ExpertSizes experts(plan);
  cos_.resize(plan.rope.size());
  sin_.resize(plan.rope.size());
  threads_.resize(static_cast<std::size_t>(num_threads));

  const std::int64_t max_rows = plan.max_num_tokens;
  const auto lay_out = [&](Carver& carver) {
    auto* arena = carver.take<std::uint8_t>(plan.arena_bytes);
    buffers_.clear();
    for (const Buffer& buffer : plan.buffers) {
      buffers_.push_back(arena == nullptr ? nullptr : reinterpret_cast<float*>(arena + buffer.offset));
    }
    rows_ = take_rows(carver, max_rows, widest_input);
    products_ = carver.take<float>(max_rows * widest_product);
    for (std::size_t table = 0; table < plan.rope.size(); ++table) {
      const auto half = static_cast<std::int64_t>(plan.rope[table].inv_freq.size());
      cos_[table] = carver.take<float>(max_rows * half);
      sin_[table] = carver.take<float>(max_rows * half);
    }
    experts_ = experts.take(carver, max_rows);
    for (ThreadSpace& thread : threads_) {
      thread.row = take_rows(carver, 1, widest_input);
      thread.tile = carver.take<float>(kTileRows * tile_width);
      thread.tile_up = carver.take<float>(kTileRows * kTileWidth);
      thread.experts = experts.take_lists(carver, max_rows);
    }
  };
  Carver measure(nullptr);
  lay_out(measure);
  memory_ = PageBuffer(measure.used());
  Carver place(memory_.data());
  lay_out(place);
}

}  // namespace aotllm
