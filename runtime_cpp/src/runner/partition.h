#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace aotllm {

/// Rows of activations and panels of weights that one kernel call works on: the weights of a tile stay in L2 while all
/// rows pass by, its outputs in L1.
inline constexpr int kTileRows = 32;
inline constexpr int kTilePanels = 4;
inline constexpr int kTileWidth = kTilePanels * cpu::kPanelRows;

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// The share of thread `index` of `items`; shares are contiguous and differ by at most one.
inline Range split(std::int64_t items, int index, int count) {
  return {items * index / count, items * (index + 1) / count};
}

inline int row_tiles(int rows) {
  return (rows + kTileRows - 1) / kTileRows;
}

/// Panels of `rows` rows of weights.
inline int panels_of(int rows) {
  return (rows + cpu::kPanelRows - 1) / cpu::kPanelRows;
}

/// Panels of a linear and rows of its input.
struct Tile {
  int panel_begin = 0;
  int panel_end = 0;
  int row_begin = 0;
  int row_end = 0;

  int rows() const noexcept { return row_end - row_begin; }
};

/// Calls visit(tile) for a thread's share of panels × rows. Panels are split first; the row tiles of one panel are
/// divided only where a share ends. Tiles change who computes a value, never the value.
template <class Visit>
void for_each_tile(int panels, int rows, int index, int count, Visit&& visit) {
  const std::int64_t tiles = row_tiles(rows);
  auto [at, end] = split(panels * tiles, index, count);
  while (at < end) {
    const int panel = static_cast<int>(at / tiles);
    const std::int64_t first = at % tiles;
    const std::int64_t whole = first == 0 ? (end - at) / tiles : 0;  // panels of which all rows are in the share
    const int width = static_cast<int>(std::clamp<std::int64_t>(whole, 1, kTilePanels));
    const std::int64_t last = std::min(tiles, first + (end - at));
    for (std::int64_t t = first; t < last; ++t) {
      const int row_begin = static_cast<int>(t) * kTileRows;
      visit(Tile{panel, panel + width, row_begin, std::min(rows, row_begin + kTileRows)});
    }
    at += whole > 0 ? width * tiles : last - first;
  }
}

}  // namespace aotllm
