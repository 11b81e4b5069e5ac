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
/// The largest tiles that may be chosen instead.
inline constexpr int kMaxTileRows = 64;
inline constexpr int kMaxTilePanels = 16;
inline constexpr int kMaxTileWidth = kMaxTilePanels * cpu::kPanelRows;

/// Of the tiles that a linear is cut to.
struct TileShape {
  int rows = kTileRows;
  int panels = kTilePanels;
};

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// The share of thread `index` of `items`; shares are contiguous and differ by at most one.
inline Range split(std::int64_t items, int index, int count) {
  return {items * index / count, items * (index + 1) / count};
}

inline int row_tiles(int rows, int tile_rows) {
  return (rows + tile_rows - 1) / tile_rows;
}

using cpu::panels_of;

/// Panels of a linear and rows of its input.
struct Tile {
  int panel_begin = 0;
  int panel_end = 0;
  int row_begin = 0;
  int row_end = 0;

  int rows() const noexcept { return row_end - row_begin; }
};

/// Calls visit(tile) for the part [at, end) of panels × row tiles, numbered by panel, then by tile. Tiles change who
/// computes a value, never the value.
template <class Visit>
void for_each_tile(int panels, int rows, TileShape shape, Range part, Visit&& visit) {
  const std::int64_t tiles = row_tiles(rows, shape.rows);
  auto [at, end] = part;
  while (at < end) {
    const int panel = static_cast<int>(at / tiles);
    const std::int64_t first = at % tiles;
    const std::int64_t whole = first == 0 ? (end - at) / tiles : 0;  // panels of which all rows are in the part
    const int width = static_cast<int>(std::clamp<std::int64_t>(whole, 1, std::min(shape.panels, panels - panel)));
    const std::int64_t last = std::min(tiles, first + (end - at));
    for (std::int64_t t = first; t < last; ++t) {
      const int row_begin = static_cast<int>(t) * shape.rows;
      visit(Tile{panel, panel + width, row_begin, std::min(rows, row_begin + shape.rows)});
    }
    at += whole > 0 ? width * tiles : last - first;
  }
}

/// Calls visit(begin, end) for tiles of about as many rows each, at most `tile_rows`: 35 = 18 + 17, not 32 + 3.
template <class Visit>
void for_each_row_tile(Range rows, int tile_rows, Visit&& visit) {
  const std::int64_t count = rows.end - rows.begin;
  const int tiles = row_tiles(static_cast<int>(count), tile_rows);
  for (int t = 0; t < tiles; ++t) {
    const Range part = split(count, t, tiles);
    visit(static_cast<int>(rows.begin + part.begin), static_cast<int>(rows.begin + part.end));
  }
}

}  // namespace aotllm
