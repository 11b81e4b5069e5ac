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

/// Calls tile(panel_begin, panel_end, row_begin, row_end) for a thread's share of panels × rows. Panels are split
/// first; row tiles of one panel are divided only where a share ends. Tiles change who computes a value, never the
/// value.
template <class Tile>
void for_each_tile(int panels, int rows, int index, int count, Tile&& tile) {
  const std::int64_t tiles = row_tiles(rows);
  auto [at, end] = split(panels * tiles, index, count);
  while (at < end) {
    const int panel = static_cast<int>(at / tiles);
    const std::int64_t first = at % tiles;
    const std::int64_t whole = first == 0 ? (end - at) / tiles : 0;
    const int width = static_cast<int>(std::clamp<std::int64_t>(whole, 1, kTilePanels));
    const std::int64_t last = std::min(tiles, whole > 0 ? tiles : first + (end - at));
    for (std::int64_t t = first; t < last; ++t) {
      tile(panel, panel + width, static_cast<int>(t * kTileRows),
           std::min(rows, static_cast<int>((t + 1) * kTileRows)));
    }
    at += whole > 0 ? width * tiles : last - first;
  }
}

}  // namespace aotllm
