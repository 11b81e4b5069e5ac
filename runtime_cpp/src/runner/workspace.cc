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

ActivationRows take_rows(Carver& carver, std::int64_t rows, std::int64_t k) {
  ActivationRows r;
  r.x = carver.take<float>(rows * k);
  r.q = carver.take<std::int8_t>(rows * k);
  r.scales = carver.take<float>(rows * (k / cpu::kActivationBlock));
  r.sums = carver.take<std::int32_t>(rows * (k / 16));
  return r;
}

}  // namespace

Workspace::Workspace(const Plan& plan, const std::vector<std::vector<QkvUnit>>& units, int num_threads) {
  std::int64_t widest_input = plan.hidden_size;
  for (const Linear& linear : plan.linears) widest_input = std::max<std::int64_t>(widest_input, linear.k);
  std::int64_t tile_width = kTileWidth;
  for (const auto& layer : units) {
    for (const QkvUnit& unit : layer) tile_width = std::max<std::int64_t>(tile_width, unit.columns);
  }
  std::int64_t widest_post_norm = 0;
  for (const Op& op : plan.ops) {
    const auto* linear = std::get_if<LinearResidualOp>(&op);
    if (linear != nullptr && !linear->post_norm.empty()) {
      widest_post_norm = std::max<std::int64_t>(widest_post_norm, plan.linears[linear->linear].n);
    }
  }
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
    unnormalized_ = carver.take<float>(max_rows * widest_post_norm);
    for (std::size_t table = 0; table < plan.rope.size(); ++table) {
      const auto half = static_cast<std::int64_t>(plan.rope[table].inv_freq.size());
      cos_[table] = carver.take<float>(max_rows * half);
      sin_[table] = carver.take<float>(max_rows * half);
    }
    for (ThreadSpace& thread : threads_) {
      thread.row = take_rows(carver, 1, widest_input);
      thread.tile = carver.take<float>(kTileRows * tile_width);
      thread.tile_up = carver.take<float>(kTileRows * kTileWidth);
    }
  };
  Carver measure(nullptr);
  lay_out(measure);
  memory_ = PageBuffer(measure.used());
  Carver place(memory_.data());
  lay_out(place);
}

}  // namespace aotllm
