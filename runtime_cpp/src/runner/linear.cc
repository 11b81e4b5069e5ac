#include "runner/linear.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "support/strings.h"

namespace aotllm {
namespace {

int segment_panels(const LinearSegment& segment) {
  return panels_of(segment.weights.n);
}

const LinearSegment& segment_of_row(const Linear& linear, int row) {
  auto it = linear.segments.begin();
  while (row >= it->row_begin + it->weights.n) ++it;
  return *it;
}

bool is_panel_boundary(const Linear& linear, int row) {
  if (row == linear.n) return true;
  return (row - segment_of_row(linear, row).row_begin) % cpu::kPanelRows == 0;
}

/// The panel that begins at `row`; precondition: is_panel_boundary(linear, row).
int panel_at_row(const Linear& linear, int row) {
  if (row == linear.n) return linear.panels;
  const LinearSegment& segment = segment_of_row(linear, row);
  return segment.panel_begin + (row - segment.row_begin) / cpu::kPanelRows;
}

/// Splits heads [0, count) at each head where all of `first_rows` (where heads begin in the linear) reach a panel
/// boundary; calls add(head_begin, head_end).
template <class Add>
void for_each_head_group(const Linear& linear, int count, int head_dim, std::initializer_list<int> first_rows,
                         Add&& add) {
  int begin = 0;
  for (int head = 1; head <= count; ++head) {
    const bool ends = std::all_of(first_rows.begin(), first_rows.end(),
                                  [&](int row) { return is_panel_boundary(linear, row + head * head_dim); });
    if (!ends && head != count) continue;
    add(begin, head);
    begin = head;
  }
}

}  // namespace

std::string format_of(const Linear& linear) {
  std::string formats;
  std::vector<cpu::Format> seen;
  for (const LinearSegment& segment : linear.segments) {
    const cpu::Format format = segment.weights.format;
    if (std::ranges::find(seen, format) != seen.end()) continue;
    seen.push_back(format);
    formats += cat(formats.empty() ? "" : "/", cpu::format_name(format));
  }
  return formats;
}

std::string shape_of(const Linear& linear) {
  return cat(linear.n, "x", linear.k, " ", format_of(linear));
}

cpu::Activations rows_from(const cpu::Activations& a, int row, int k) {
  cpu::Activations from = a;
  if (a.x != nullptr) from.x += row * a.x_stride;
  if (a.blocks != nullptr) from.blocks += row * cpu::activation_stride(k);
  if (a.bf16 != nullptr) from.bf16 += row * cpu::bf16_stride(k);
  return from;
}

int row_of_panel(const Linear& linear, int panel) {
  if (panel >= linear.panels) return linear.n;
  auto it = linear.segments.begin();
  while (panel >= it->panel_begin + segment_panels(*it)) ++it;
  return it->row_begin + (panel - it->panel_begin) * cpu::kPanelRows;
}

void multiply(const cpu::Kernels& kernels, const Linear& linear, const cpu::Activations& a, const Tile& tile, float* y,
              std::ptrdiff_t y_stride) {
  const int first_row = row_of_panel(linear, tile.panel_begin);
  const cpu::Activations rows = rows_from(a, tile.row_begin, linear.k);
  for (const LinearSegment& segment : linear.segments) {
    const int begin = std::max(tile.panel_begin - segment.panel_begin, 0);
    const int end = std::min(tile.panel_end - segment.panel_begin, segment_panels(segment));
    if (begin >= end) continue;
    const int column = segment.row_begin + begin * cpu::kPanelRows - first_row;
    kernels.matmul(segment.weights, rows, tile.rows(), begin, end, y + column, y_stride);
  }
}

std::vector<QkvUnit> qkv_units(const Linear& linear, const Heads& heads) {
  std::vector<QkvUnit> units;
  const int k_row = heads.q_width();
  const int v_row = k_row + heads.kv_width();
  const auto product = [&](int row_begin, int row_end, int column) {
    return QkvUnit::Product{panel_at_row(linear, row_begin), panel_at_row(linear, row_end), column};
  };

  if (!is_panel_boundary(linear, k_row) || !is_panel_boundary(linear, v_row)) {
    QkvUnit all{0, heads.num_heads, 0, heads.num_kv_heads, linear.n, {}};
    all.products = {product(0, linear.n, 0)};
    units.push_back(std::move(all));
    return units;
  }
  for_each_head_group(linear, heads.num_heads, heads.head_dim, {0}, [&](int begin, int end) {
    QkvUnit unit{begin, end, 0, 0, (end - begin) * heads.head_dim, {}};
    unit.products = {product(begin * heads.head_dim, end * heads.head_dim, 0)};
    units.push_back(std::move(unit));
  });
  for_each_head_group(linear, heads.num_kv_heads, heads.head_dim, {k_row, v_row}, [&](int begin, int end) {
    const int width = (end - begin) * heads.head_dim;
    const int first = begin * heads.head_dim;
    QkvUnit unit{0, 0, begin, end, 2 * width, {}};
    unit.products = {product(k_row + first, k_row + first + width, 0),
                     product(v_row + first, v_row + first + width, width)};
    units.push_back(std::move(unit));
  });
  return units;
}

}  // namespace aotllm
