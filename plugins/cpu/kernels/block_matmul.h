#pragma once

#include "kernels/block_formats.h"

// The matmul of block formats: integer dot products within an activation block, float sums over blocks.
//
// Reduction order of one output, the same for every row count, panel range and ISA: for each activation block of 16 in
// ascending k,
//   acc = fma(Σ q·(code - zero), weight scale · activation scale, acc)       the Σ exact in int32
//   acc = fma(min, activation scale · Σ q, acc)                              affine formats

namespace aotllm::cpu::AOTLLM_ISA {

/// A tile of activation rows.
template <int M>
struct RowTile {
  const std::int8_t* q[M];
  const float* scales[M];
  const std::int32_t* sums[M];
};

template <int M>
inline RowTile<M> row_tile(const Activations& a, int k, int row) {
  RowTile<M> tile;
  for (int m = 0; m < M; ++m) {
    const std::ptrdiff_t r = row + m;
    tile.q[m] = a.q + r * k;
    tile.scales[m] = a.scales + r * (k / kActivationBlock);
    tile.sums[m] = a.sums + r * (k / kActivationBlock);
  }
  return tile;
}

/// Adds the products of groups [G, End) of a block to int16 or int32 sums.
template <class Codes, int G, int End, int M>
inline void dot_groups(const std::uint8_t* lines, const std::int8_t* const (&q)[M], int offset, DotSum (&sums)[M]) {
  if constexpr (G < End) {
    const auto codes = Codes::template get<G>(lines);
    for (int m = 0; m < M; ++m) sums[m] = dot(sums[m], codes, broadcast_quad(q[m] + offset + 4 * G));
    dot_groups<Codes, G + 1, End, M>(lines, q, offset, sums);
  }
}

/// Integer sums of groups [G, End), flushed to int32 before an int16 can overflow.
template <class Codes, int G, int End, int M>
inline void dot_block(const std::uint8_t* lines, const std::int8_t* const (&q)[M], int offset, I32x16 (&isum)[M]) {
  if constexpr (G < End) {
    constexpr int kStop = G + Codes::kMaxSum < End ? G + Codes::kMaxSum : End;
    DotSum sums[M];
    for (int m = 0; m < M; ++m) sums[m] = zero_dot();
    dot_groups<Codes, G, kStop, M>(lines, q, offset, sums);
    for (int m = 0; m < M; ++m) isum[m] = add(isum[m], lane_sums(sums[m]));
    dot_block<Codes, kStop, End, M>(lines, q, offset, isum);
  }
}

/// Half `Half` of block `block`, which is one activation block, added to `acc`.
template <class F, int Half, int M>
inline void add_half(const std::uint8_t* lines, F32x16 scale, F32x16 min, const RowTile<M>& rows, int block,
                     F32x16 (&acc)[M]) {
  constexpr int kQuadsPerHalf = kQuads / 2;
  constexpr bool kSigned = __is_same(decltype(F::Codes::template get<0>(nullptr)), SignedCodes);
  constexpr int kZero = F::kZero + (kSigned ? kSignedBias : 0);

  I32x16 isum[M];
  for (int m = 0; m < M; ++m) isum[m] = set1_i32(0);
  dot_block<typename F::Codes, Half * kQuadsPerHalf, (Half + 1) * kQuadsPerHalf, M>(lines, rows.q, 32 * block, isum);
  for (int m = 0; m < M; ++m) {
    const float a = rows.scales[m][2 * block + Half];
    const std::int32_t sum = rows.sums[m][2 * block + Half];
    if constexpr (kZero != 0) isum[m] = sub(isum[m], set1_i32(kZero * sum));
    acc[m] = fma(to_f32(isum[m]), mul(scale, set1(a)), acc[m]);
    if constexpr (F::Scales::kAffine) acc[m] = fma(min, set1(a * static_cast<float>(sum)), acc[m]);
  }
}

/// Block `block`: its two halves share a weight scale or have one each.
template <class F, int M>
inline void add_block(const std::uint8_t* lines, const std::uint8_t* scales, const RowTile<M>& rows, int block,
                      F32x16 (&acc)[M]) {
  using Scales = typename F::Scales;
  F32x16 scale = Scales::scale(scales, block, 0);
  F32x16 min = set1(0.0f);
  if constexpr (Scales::kAffine) min = Scales::min(scales, block, 0);
  add_half<F, 0, M>(lines, scale, min, rows, block, acc);
  if constexpr (Scales::kGroups == 2) {
    scale = Scales::scale(scales, block, 1);
    if constexpr (Scales::kAffine) min = Scales::min(scales, block, 1);
  }
  add_half<F, 1, M>(lines, scale, min, rows, block, acc);
}

/// One panel times M rows.
template <class F, int M>
void panel_times_rows(const std::uint8_t* panel, int k, const RowTile<M>& rows, F32x16 (&acc)[M]) {
  constexpr int kBlockBytes = F::Codes::kLines * kLineBytes;
  const int blocks = k / 32;
  const std::uint8_t* scales = panel + static_cast<std::ptrdiff_t>(blocks) * kBlockBytes;
  for (int m = 0; m < M; ++m) acc[m] = set1(0.0f);
  for (int block = 0; block < blocks; ++block) {
    const std::uint8_t* lines = panel + static_cast<std::ptrdiff_t>(block) * kBlockBytes;
    add_block<F, M>(lines, scales, rows, block, acc);
  }
}

/// Calls the tile of exactly `count` ≤ M rows.
template <class F, int M>
void run_tile(int count, const std::uint8_t* panel, int k, const Activations& a, int row, float* y,
              std::ptrdiff_t y_stride, int lanes) {
  if constexpr (M > 1) {
    if (count < M) return run_tile<F, M - 1>(count, panel, k, a, row, y, y_stride, lanes);
  }
  F32x16 acc[M];
  panel_times_rows<F, M>(panel, k, row_tile<M>(a, k, row), acc);
  for (int m = 0; m < M; ++m) store_lanes(y + (row + m) * y_stride, acc[m], lanes);
}

/// Panels outside, rows inside: a panel is read from memory once and stays in the cache while all rows pass. Rows are
/// split evenly (5 = 3 + 2, not 4 + 1).
template <class F>
void matmul_panels(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                   std::ptrdiff_t y_stride) {
  const std::size_t stride = panel_bytes(w.format, w.k);
  const int tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
  for (int p = panel_begin; p < panel_end; ++p) {
    const std::uint8_t* panel = w.panels + stride * static_cast<std::size_t>(p);
    const int left = w.n - p * kPanelRows;
    const int lanes = left < kPanelRows ? left : kPanelRows;
    float* out = y + static_cast<std::ptrdiff_t>(p - panel_begin) * kPanelRows;
    for (int tile = 0, row = 0; tile < tiles; ++tile) {
      const int count = (rows - row + tiles - tile - 1) / (tiles - tile);
      run_tile<F, kMaxTileRows>(count, panel, w.k, a, row, out, y_stride, lanes);
      row += count;
    }
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
