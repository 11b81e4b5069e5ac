#include "runner/workspace.h"

#include <algorithm>

#include "runner/attention_calls.h"
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
  r.blocks = carver.take<cpu::ActivationBlock>(rows * cpu::activation_stride(static_cast<int>(k)));
  return r;
}

/// `bf16_k`: the widest input of bf16 weights, 0 where there are none.
ActivationRows take_rows(Carver& carver, std::int64_t rows, std::int64_t k, std::int64_t bf16_k) {
  ActivationRows r = take_codes(carver, rows, k);
  r.x = carver.take<float>(rows * k);
  if (bf16_k > 0) r.bf16 = carver.take<std::uint16_t>(rows * cpu::bf16_stride(static_cast<int>(bf16_k)));
  return r;
}

std::int64_t widest_bf16_input(const Plan& plan) {
  std::int64_t k = 0;
  for (const Linear& linear : plan.linears) {
    if (linear.has_bf16) k = std::max<std::int64_t>(k, linear.k);
  }
  return k;
}

/// The most that any norm_moe of a plan needs.
struct ExpertSizes {
  std::int64_t num_experts = 0;
  std::int64_t top_k = 0;
  std::int64_t in_floats = 0;  ///< floats of a slot that some op gathers
  std::int64_t in_codes = 0;
  std::int64_t in_bf16 = 0;
  std::int64_t gated = 0;  ///< floats of a slot
  std::int64_t gated_codes = 0;
  std::int64_t gated_bf16 = 0;

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
    if (gate.has_bf16 || up.has_bf16) raise(in_bf16, gate.k);
    raise(gated, op.neurons);
    if (plan.linears[op.down].has_bf16) raise(gated_bf16, op.neurons);
    if (plan.linears[op.down].has_block) raise(gated_codes, op.neurons);
  }

  /// Of `slots` rows.
  static ActivationRows take(Carver& carver, std::int64_t slots, std::int64_t floats, std::int64_t codes,
                             std::int64_t bf16_k) {
    ActivationRows rows = take_codes(carver, slots, codes);
    if (bf16_k > 0) rows.bf16 = carver.take<std::uint16_t>(slots * cpu::bf16_stride(static_cast<int>(bf16_k)));
    if (floats > 0) rows.x = carver.take<float>(slots * floats);
    return rows;
  }

  ExpertSpace take(Carver& carver, std::int64_t rows) const {
    ExpertSpace space;
    if (num_experts == 0) return space;
    space.logits = carver.take<float>(rows * num_experts);
    space.choices = carver.take<std::int32_t>(rows * top_k);
    space.weights = carver.take<float>(rows * top_k);
    space.in = take(carver, rows * top_k, in_floats, in_codes, in_bf16);
    space.gated = take(carver, rows * top_k, gated, gated_codes, gated_bf16);
    return space;
  }

  ExpertRows take_lists(Carver& carver, std::int64_t rows) const {
    if (num_experts == 0) return {};
    return {carver.take<std::int32_t>(num_experts + 1), carver.take<std::int32_t>(rows * top_k),
            carver.take<float>(rows * top_k)};
  }
};

/// Floats of the partials of one call of attention that threads share, the most that any op makes.
std::int64_t partial_floats(const Plan& plan) {
  std::int64_t most = 0;
  for (const Op& op : plan.ops) {
    const auto* attention = std::get_if<PagedAttentionOp>(&op);
    if (attention == nullptr) continue;
    const int head_dim = attention->heads.head_dim;
    std::int64_t ranges = 0;
    for (int at = 0; at < plan.max_seq_len; at = cpu::next_kv_range(at, attention->window)) ++ranges;
    most = std::max(most, ranges * max_shared_vectors(head_dim) * cpu::attention_partial_floats(head_dim));
  }
  return most;
}

}  // namespace

Workspace::Workspace(const Plan& plan, const std::vector<std::vector<QkvUnit>>& units, int num_threads) {
  std::int64_t widest_input = plan.hidden_size;
  for (const Linear& linear : plan.linears) widest_input = std::max<std::int64_t>(widest_input, linear.k);
  std::int64_t tile_width = kMaxTileWidth;
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
  const std::int64_t bf16_input = widest_bf16_input(plan);
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
    rows_ = take_rows(carver, max_rows, widest_input, bf16_input);
    products_ = carver.take<float>(max_rows * widest_product);
    for (std::size_t table = 0; table < plan.rope.size(); ++table) {
      const auto half = static_cast<std::int64_t>(plan.rope[table].inv_freq.size());
      cos_[table] = carver.take<float>(max_rows * half);
      sin_[table] = carver.take<float>(max_rows * half);
    }
    experts_ = experts.take(carver, max_rows);
    attention_.partial_floats = partial_floats(plan);
    attention_.partials = carver.take<float>((num_threads - 1) * attention_.partial_floats);
    attention_.done = carver.take<std::int32_t>(num_threads - 1);
    for (ThreadSpace& thread : threads_) {
      thread.row = take_rows(carver, 1, widest_input, bf16_input);
      thread.tile = carver.take<float>(kMaxTileRows * tile_width);
      thread.tile_up = carver.take<float>(kMaxTileRows * kMaxTileWidth);
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
