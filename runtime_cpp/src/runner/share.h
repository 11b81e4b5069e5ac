#pragma once

#include <cstdint>

#include "runner/ops.h"
#include "runner/partition.h"

// How the threads of a rank share panels × rows. Who computes a value never changes it.

namespace aotllm {

/// The last of `kDealtOut` equal parts of the work is dealt out tile by tile to whoever has done its share, so that a
/// thread that others slow down does not keep all waiting.
inline constexpr std::int64_t kDealtOut = 8;

/// Calls visit(tile) for this thread's share of panels × rows; panels are split first. Followed by a barrier, as all
/// that takes `Worker::next`.
template <class Visit>
void share_panels(const Worker& worker, int panels, int rows, TileShape shape, Visit&& visit) {
  const std::int64_t tiles = std::int64_t{panels} * row_tiles(rows, shape.rows);
  const std::int64_t dealt_out = worker.count == 1 ? 0 : tiles / kDealtOut;
  const std::int64_t whole = tiles - dealt_out;
  for_each_tile(panels, rows, shape, split(whole, worker.index, worker.count), visit);
  while (dealt_out > 0) {
    const std::int64_t at = whole + worker.next();
    if (at >= tiles) break;
    for_each_tile(panels, rows, shape, {at, at + 1}, visit);
  }
}

/// The same for all rows of the step, which may be the threads' own: then each has all panels of its rows.
template <class Visit>
void share_tiles(const Worker& worker, int panels, TileShape shape, Visit&& visit) {
  if (!worker.owns_rows) return share_panels(worker, panels, worker.step.batch.rows(), shape, visit);
  for (int panel = 0; panel < panels; panel += shape.panels) {
    for_each_row_tile(worker.own_rows(), shape.rows, [&](int begin, int end) {
      visit(Tile{panel, std::min(panel + shape.panels, panels), begin, end});
    });
  }
}

}  // namespace aotllm
