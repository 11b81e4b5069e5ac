#include "runner/lora.h"

#include <algorithm>
#include <utility>

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {

Lora::Lora(const Plan& plan) : plan_(plan), sites_(plan) {
  runs_.reserve(static_cast<std::size_t>(plan.max_num_tokens));
}

void Lora::load(AdapterId id, const Adapter& adapter) {
  if (id < 1) throw Error(ErrorKind::kInternal, cat("load_adapter: expected an id of at least 1, got ", id));
  if (adapters_.contains(id))
    throw Error(ErrorKind::kInternal, cat("load_adapter: adapter ", id, " is loaded already"));
  check_adapter(adapter, plan_);
  auto packed = std::make_unique<const PackedAdapter>(adapter, sites_);
  if (packed->widest() > stride_) {
    products_ = PageBuffer(sizeof(float) * static_cast<std::size_t>(plan_.max_num_tokens) * packed->widest());
    stride_ = packed->widest();
  }
  adapters_.emplace(id, std::move(packed));
}

void Lora::unload(AdapterId id) {
  if (adapters_.erase(id) == 0) throw Error(ErrorKind::kInternal, cat("unload_adapter: no adapter ", id, " is loaded"));
  runs_.clear();  // they may point to it
}

std::int64_t Lora::bytes() const noexcept {
  auto bytes = static_cast<std::int64_t>(products_.size());
  for (const auto& [id, adapter] : adapters_) bytes += adapter->bytes();
  return bytes;
}

void Lora::assign(std::span<const SequenceStep> sequences) {
  runs_.clear();
  int row = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const int begin = row;
    row += static_cast<int>(sequences[i].tokens.size());
    if (sequences[i].adapter == 0) continue;
    const auto it = adapters_.find(sequences[i].adapter);
    if (it == adapters_.end()) {
      throw Error(ErrorKind::kInternal,
                  cat("step: sequence ", i, ": expected 0 or a loaded adapter, got adapter ", sequences[i].adapter));
    }
    const PackedAdapter* adapter = it->second.get();
    if (!runs_.empty() && runs_.back().row_end == begin && runs_.back().adapter == adapter) {
      runs_.back().row_end = row;
    } else {
      runs_.push_back({begin, row, adapter});
    }
  }
}

bool Lora::updates(int linear) const noexcept {
  if (runs_.empty()) return false;
  const int group = sites_.group_of(linear);
  return group >= 0 &&
         std::any_of(runs_.begin(), runs_.end(), [&](const Run& run) { return run.adapter->group(group).ranks > 0; });
}

void Lora::shrink(const cpu::Kernels& kernels, int linear, const cpu::Activations& a, Range rows, int index,
                  int count) const {
  const int g = sites_.group_of(linear);
  const auto within = [&](const Run& run) {
    return Range{std::max<std::int64_t>(run.row_begin, rows.begin), std::min<std::int64_t>(run.row_end, rows.end)};
  };
  std::int64_t products = 0;
  for (const Run& run : runs_) {
    const Range part = within(run);
    products += std::max<std::int64_t>(part.end - part.begin, 0) * run.adapter->group(g).ranks;
  }
  const Range share = split(products, index, count);
  std::int64_t at = 0;  // products before the row
  for (const Run& run : runs_) {
    const PackedAdapter::Group& group = run.adapter->group(g);
    const Range part = within(run);
    for (std::int64_t row = part.begin; row < part.end; ++row, at += group.ranks) {
      const std::int64_t begin = std::clamp<std::int64_t>(share.begin - at, 0, group.ranks);
      const std::int64_t end = std::clamp<std::int64_t>(share.end - at, 0, group.ranks);
      if (begin == end) continue;
      kernels.dot_rows(group.a + begin * group.k, a.x + row * a.x_stride, static_cast<int>(end - begin), group.k,
                       products_of(row) + begin);
    }
  }
}

void Lora::expand(const cpu::Kernels& kernels, int linear, const OutputBlock& block) const {
  const int g = sites_.group_of(linear);
  if (g < 0) return;
  for (const Run& run : runs_) {
    const int begin = std::max(run.row_begin, block.row_begin);
    const int end = std::min(run.row_end, block.row_end);
    if (begin >= end) continue;
    OutputBlock part_block = block;
    part_block.y += (begin - block.row_begin) * block.y_stride;
    part_block.row_begin = begin;
    part_block.row_end = end;
    for (const PackedAdapter::Group::Part& part : run.adapter->group(g).parts) {
      if (part.linear == linear) add_part(kernels, part, part_block);
    }
  }
}

void Lora::add_part(const cpu::Kernels& kernels, const PackedAdapter::Group::Part& part,
                    const OutputBlock& block) const {
  // Rows of the module; the block may begin or end inside of a panel, whose other lanes are computed in vain.
  const int first = std::max(block.column - part.row_begin, 0);
  const int last = std::min(block.column + block.width - part.row_begin, part.b.n);
  if (first >= last) return;
  const int rows = block.row_end - block.row_begin;
  cpu::Activations products;
  products.x = products_of(block.row_begin) + part.first_rank;
  products.x_stride = stride_;
  alignas(64) float delta[kTileRows * kTileWidth];
  for (int panel = first / cpu::kPanelRows; panel * cpu::kPanelRows < last; panel += kTilePanels) {
    const int panel_end = std::min(panel + kTilePanels, panels_of(last));
    kernels.matmul(part.b, products, rows, panel, panel_end, delta, kTileWidth);
    const int from = std::max(first, panel * cpu::kPanelRows);
    const int to = std::min(last, panel_end * cpu::kPanelRows);
    float* y = block.y + (part.row_begin + from - block.column);
    const float* d = delta + (from - panel * cpu::kPanelRows);
    for (int row = 0; row < rows; ++row, y += block.y_stride, d += kTileWidth) kernels.add(y, d, to - from, y);
  }
}

}  // namespace aotllm
