#pragma once

#include <string>
#include <vector>

#include "engine/plan.h"
#include "kernels.h"
#include "runner/partition.h"

namespace aotllm {

/// Formats of the segments, each once: "q4_1", "q5_0/q8_0".
std::string format_of(const Linear& linear);
/// "960x576 q4_1": rows × columns, formats.
std::string shape_of(const Linear& linear);

/// First row of panel `panel`; n for the panel past the end.
int row_of_panel(const Linear& linear, int panel);

/// Activations from row `row` on, of a linear of `k` columns.
cpu::Activations rows_from(const cpu::Activations& a, int row, int k);

/// The products of a tile: row r of the tile goes to y + r · y_stride, its first column is
/// row_of_panel(tile.panel_begin) of the linear. `a` holds all rows of the input.
void multiply(const cpu::Kernels& kernels, const Linear& linear, const cpu::Activations& a, const Tile& tile, float* y,
              std::ptrdiff_t y_stride);

/// Heads that one thread computes together, products and epilogue (norm, RoPE, store) without a barrier between: a head
/// of Q, or a KV head's K and V. More than one head where a single one does not end on a panel boundary.
struct QkvUnit {
  /// Panels to multiply, and the column where their first row goes.
  struct Product {
    int panel_begin = 0;
    int panel_end = 0;
    int column = 0;
  };

  int q_begin = 0;  ///< heads of Q; columns [0, …)
  int q_end = 0;
  int kv_begin = 0;  ///< KV heads; columns of K after those of Q, columns of V after those of K
  int kv_end = 0;
  int columns = 0;
  std::vector<Product> products;
};

std::vector<QkvUnit> qkv_units(const Linear& linear, const Heads& heads);

}  // namespace aotllm
