#pragma once

#include "kernels/ops.h"
#include "kernels/simd.h"

// How the matmul of float formats goes over rows and panels. A tile is M rows × P panels of sums in registers, over the
// whole of k: M · P independent chains hide the latency of a multiply-add, each weight is loaded once for M rows and
// each activation once for P panels. Tiles change what is computed together, never a value.

namespace aotllm::cpu::AOTLLM_ISA {

#if defined(__AVX512F__)
/// Most rows of a tile; a step of that many sequences or fewer streams the weights once.
inline constexpr int kMaxFloatRows = 8;
/// Rows of the tiles that more rows are divided into: 6 × 4 sums, 4 panels and a row's value fill the registers.
inline constexpr int kManyFloatRows = 6;
/// Panels beside M rows.
constexpr int float_tile_panels(int m) {
  return m <= 6 ? 4 : 2;
}
#else
inline constexpr int kMaxFloatRows = 4;
inline constexpr int kManyFloatRows = 4;
constexpr int float_tile_panels(int m) {
  return m == 1 ? 4 : m == 2 ? 2 : 1;
}
#endif
/// Panels that stay in L2 while all rows pass by.
inline constexpr int kFloatGroupPanels = 4;

/// Where a tile reads and writes.
struct FloatTile {
  const std::uint8_t* panel;  ///< the first one
  std::size_t panel_stride;   ///< bytes
  int k;
  int row;
  float* y;  ///< of row 0 and the first panel
  std::ptrdiff_t y_stride;
  int lanes;  ///< rows of W from the first panel on: the last panel may have less than 16
};

/// With fewer rows loads wait for memory anyway, and the CPU's own prefetchers do better.
inline constexpr int kLeastRowsToPrefetch = 4;

/// Asks for what the next tile reads where this one reads `weights`: panels are short, and prefetchers begin anew with
/// each. Only for the first rows: after them the weights are there. Not by `prefetch`, whose assembly in this innermost
/// loop halves the speed.
template <int P>
inline void prefetch_next(const FloatTile& t, const std::uint8_t* weights) {
  constexpr int kToL2 = 2;
  const std::size_t ahead = t.row == 0 ? P * t.panel_stride : 0;
  for (int p = 0; p < P; ++p) __builtin_prefetch(weights + t.panel_stride * p + ahead, 0, kToL2);
}

template <int M, int P>
inline void store_tile(const FloatTile& t, const F32x16 (&sums)[M][P]) {
  for (int m = 0; m < M; ++m) {
    for (int p = 0; p < P; ++p) {
      store_lanes(t.y + (t.row + m) * t.y_stride + p * kLanes, sums[m][p], t.lanes - p * kLanes);
    }
  }
}

/// M rows of `panels` neighbouring panels. `W::tile<M, P>(tile, activations)` computes one tile.
template <class W, int M>
void float_rows(FloatTile t, const Activations& a, int panels) {
  constexpr int kMost = float_tile_panels(M);
  const auto advance = [&](int count) {
    t.panel += t.panel_stride * static_cast<std::size_t>(count);
    t.y += count * kLanes;
    t.lanes -= count * kLanes;
    panels -= count;
  };
  while (panels >= kMost) {
    W::template tile<M, kMost>(t, a);
    advance(kMost);
  }
  if constexpr (kMost > 2) {
    if (panels >= 2) {
      W::template tile<M, 2>(t, a);
      advance(2);
    }
  }
  if (panels > 0) W::template tile<M, 1>(t, a);
}

/// As above for any m in [1, M].
template <class W, int M = kMaxFloatRows>
void float_rows_of(int m, const FloatTile& t, const Activations& a, int panels) {
  if constexpr (M > 1) {
    if (m < M) return float_rows_of<W, M - 1>(m, t, a, panels);
  }
  float_rows<W, M>(t, a, panels);
}

/// All of `matmul` for weights of kind W.
template <class W>
void float_panels(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                  std::ptrdiff_t y_stride) {
  // More rows than fit a tile are divided evenly: 8 + 1 would leave the last pass waiting for weights.
  const int passes = rows <= kMaxFloatRows ? 1 : (rows + kManyFloatRows - 1) / kManyFloatRows;
  const std::size_t stride = panel_bytes(w.format, w.k);
  for (int p = panel_begin; p < panel_end; p += kFloatGroupPanels) {
    const int panels = panel_end - p < kFloatGroupPanels ? panel_end - p : kFloatGroupPanels;
    FloatTile t{w.panels + stride * static_cast<std::size_t>(p),
                stride,
                w.k,
                0,
                y + static_cast<std::ptrdiff_t>(p - panel_begin) * kLanes,
                y_stride,
                w.n - p * kLanes};
    for (int pass = 0; pass < passes; ++pass) {
      t.row = rows * pass / passes;
      float_rows_of<W>(rows * (pass + 1) / passes - t.row, t, a, panels);
    }
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
