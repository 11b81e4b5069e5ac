#pragma once

#include "kernels/block_formats.h"

// The matmul of block formats: integer dot products within an activation group, float sums over blocks.
//
// Reduction order of one output, the same for every row count, panel range and ISA: for each block of 32 in ascending
// k, with i_h = Σ q·(code - zero) over its half h, exact in int32, and the activation factors f_h of the halves,
//   one weight scale      acc = fma(fma(i_1, f_1, i_0·f_0), scale, acc), with a min then acc = fma(min, sum, acc)
//   ... and 4-bit codes   acc = fma(f_0·i_0 + f_1·i_1, scale, acc): that sum is exact in int32, then a float
//   one of each half h    acc = fma(i_h·f_h, scale_h, acc)
//   with a min            acc = fma(fma(i_h, scale_h, min_h·Σ q), f_h, acc)
// and in the end acc · the row's scale.
// All multiplications run on the same ports as the integer products, so that they are what is worth saving: to eight
// instructions of products two more for 4-bit codes, three for others, and one for a min.

namespace aotllm::cpu::AOTLLM_ISA {

/// M rows of activations at a block.
template <int M>
struct RowTile {
  const ActivationBlock* first;
  std::ptrdiff_t stride;
  const ActivationBlock& operator[](int m) const { return first[m * stride]; }
};

/// Codes of format F as a tile of M rows multiplies them.
template <class F, int M>
struct TileCodes {
  using Codes = typename F::Codes;
  static constexpr int kMaxSum = Codes::kMaxSum;
  static constexpr bool kSigned = __is_same(decltype(Codes::template get<0>(nullptr)), SignedCodes);
  static constexpr int kPlainZero = F::kZero + (kSigned ? kSignedBias : 0);
  /// Added to codes, where int32 sums allow it, so that the zero point is one whose sums an activation block has: from
  /// four rows on that is cheaper than to shift each row's.
  static constexpr int kRaise =
      __is_same(DotSum, I32x16) && M >= 4 && kPlainZero != 0 && kPlainZero != 8 ? 128 - kPlainZero : 0;
  static constexpr int kZero = kPlainZero + kRaise;

  template <int G>
  static auto get(const std::uint8_t* lines) {
    if constexpr (kRaise == 0) {
      return Codes::template get<G>(lines);
    } else {
      return add_bytes(Codes::template get<G>(lines), kRaise);
    }
  }
};

/// Adds the products of groups [G, End) of a block to int16 or int32 sums.
template <class Codes, int G, int End, int M>
inline void dot_groups(const std::uint8_t* lines, const RowTile<M>& rows, DotSum (&sums)[M]) {
  if constexpr (G < End) {
    const auto codes = Codes::template get<G>(lines);
    for (int m = 0; m < M; ++m) sums[m] = dot(sums[m], codes, broadcast_quad(rows[m].q + 4 * G));
    dot_groups<Codes, G + 1, End, M>(lines, rows, sums);
  }
}

/// Adds the integer sums of groups [G, End), flushed to int32 before an int16 can overflow.
template <class Codes, int G, int End, int M>
inline void dot_half(const std::uint8_t* lines, const RowTile<M>& rows, I32x16 (&isum)[M]) {
  if constexpr (__is_same(DotSum, I32x16)) {
    dot_groups<Codes, G, End, M>(lines, rows, isum);
  } else if constexpr (G < End) {
    constexpr int kStop = G + Codes::kMaxSum < End ? G + Codes::kMaxSum : End;
    DotSum sums[M];
    for (int m = 0; m < M; ++m) sums[m] = DotSum{};
    dot_groups<Codes, G, kStop, M>(lines, rows, sums);
    for (int m = 0; m < M; ++m) isum[m] = add(isum[m], lane_sums(sums[m]));
    dot_half<Codes, kStop, End, M>(lines, rows, isum);
  }
}

/// -Zero · Σ q of a half, in each lane.
template <int Zero>
inline I32x16 minus_zero_sum(const ActivationBlock& x, int half) {
  if constexpr (Zero == 0) {
    return set1_i32(0);
  } else if constexpr (Zero == 128) {
    return set1_i32(x.minus_128_sums[half]);
  } else {
    constexpr int kShift = __builtin_ctz(Zero) - 3;
    static_assert(Zero == 1 << (kShift + 3));
    const I32x16 sum = set1_i32(x.minus_8_sums[half]);
    if constexpr (kShift < 0) {
      return shift_right<-kShift>(sum);
    } else {
      return shift_left<kShift>(sum);
    }
  }
}

/// Σ q·(code - zero) of half `Half` of a block.
template <class F, int Half, int M>
inline void half_sums(const std::uint8_t* lines, const RowTile<M>& rows, I32x16 (&sums)[M]) {
  constexpr int kQuadsPerHalf = kQuads / 2;
  using Codes = TileCodes<F, M>;
  for (int m = 0; m < M; ++m) sums[m] = minus_zero_sum<Codes::kZero>(rows[m], Half);
  dot_half<Codes, Half * kQuadsPerHalf, (Half + 1) * kQuadsPerHalf, M>(lines, rows, sums);
}

/// The sums of both halves, each times the activations' factor.
template <class F, int M>
inline void block_sums(const std::uint8_t* lines, const RowTile<M>& rows, F32x16 (&sums)[M]) {
  I32x16 first[M];
  I32x16 second[M];
  half_sums<F, 0, M>(lines, rows, first);
  if constexpr (F::Codes::kFitsInt16) {
    half_sums<F, 1, M>(lines, rows, second);
    for (int m = 0; m < M; ++m) {
      sums[m] = to_f32(dot(pair_up(first[m], second[m]), broadcast_pair(rows[m].factors)));
    }
  } else {
    for (int m = 0; m < M; ++m) sums[m] = mul(to_f32(first[m]), set1(rows[m].scales[0]));
    half_sums<F, 1, M>(lines, rows, second);
    for (int m = 0; m < M; ++m) sums[m] = fma(to_f32(second[m]), set1(rows[m].scales[1]), sums[m]);
  }
}

/// A block whose halves share a weight scale.
template <class F, int M>
inline void add_whole_block(const std::uint8_t* lines, const typename F::Scales::Block& scales, const RowTile<M>& rows,
                            F32x16 (&acc)[M]) {
  F32x16 sums[M];
  block_sums<F, M>(lines, rows, sums);
  const F32x16 scale = scales.scale(0);
  for (int m = 0; m < M; ++m) acc[m] = fma(sums[m], scale, acc[m]);
  if constexpr (F::Scales::kAffine) {
    const F32x16 min = scales.min(0);
    for (int m = 0; m < M; ++m) acc[m] = fma(min, set1(rows[m].sum), acc[m]);
  }
}

/// Half of a block whose halves have weight scales of their own.
template <class F, int Half, int M>
inline void add_half_block(const std::uint8_t* lines, const typename F::Scales::Block& scales, const RowTile<M>& rows,
                           F32x16 (&acc)[M]) {
  I32x16 sums[M];
  F32x16 t[M];
  half_sums<F, Half, M>(lines, rows, sums);
  for (int m = 0; m < M; ++m) t[m] = to_f32(sums[m]);
  const F32x16 scale = scales.scale(Half);
  if constexpr (F::Scales::kAffine) {
    const F32x16 min = mul(scales.min(Half), set1(-0.125f));  // of -8 · Σ q: exact
    for (int m = 0; m < M; ++m) {
      const F32x16 value = fma(t[m], scale, mul(min, to_f32(set1_i32(rows[m].minus_8_sums[Half]))));
      acc[m] = fma(value, set1(rows[m].scales[Half]), acc[m]);
    }
  } else {
    for (int m = 0; m < M; ++m) acc[m] = fma(mul(t[m], set1(rows[m].scales[Half])), scale, acc[m]);
  }
}

/// One panel times M rows. On the way, where `ahead` is not 0, asks for the lines that lie so many bytes further on.
/// Always inlined: the sums would lie in memory otherwise.
template <class F, int M>
[[gnu::always_inline]] inline void panel_times_rows(const std::uint8_t* panel, int k, std::ptrdiff_t ahead,
                                                    RowTile<M> rows, F32x16 (&acc)[M]) {
  constexpr int kBlockBytes = F::Codes::kLines * kLineBytes;
  const std::uint8_t* end = panel + static_cast<std::ptrdiff_t>(k / kWeightBlock) * kBlockBytes;
  typename F::Scales::Reader scales{end};
  for (int m = 0; m < M; ++m) acc[m] = set1(0.0f);
  for (const std::uint8_t* lines = panel; lines != end; lines += kBlockBytes) {
    if (ahead != 0) {
      for (int i = 0; i < F::Codes::kLines; ++i) prefetch(lines + ahead + i * kLineBytes);
      prefetch(scales.next_block + ahead);
    }
    const typename F::Scales::Block at = scales.next();
    if constexpr (F::Scales::kGroups == 1) {
      add_whole_block<F, M>(lines, at, rows, acc);
    } else {
      add_half_block<F, 0, M>(lines, at, rows, acc);
      add_half_block<F, 1, M>(lines, at, rows, acc);
    }
    ++rows.first;
  }
  for (int m = 0; m < M; ++m) acc[m] = mul(acc[m], set1(rows[m].scales[0]));  // the lines behind: `row_scale`
}

/// A panel, and how far on the one is that its first row tile asks for.
struct PanelAt {
  const std::uint8_t* panel;
  int k;
  std::ptrdiff_t ahead;
};

/// Calls the tile of exactly `count` ≤ M rows.
template <class F, int M>
void run_tile(int count, const PanelAt& at, const ActivationBlock* rows, float* y, std::ptrdiff_t y_stride, int lanes) {
  if constexpr (M > 1) {
    if (count < M) return run_tile<F, M - 1>(count, at, rows, y, y_stride, lanes);
  }
  F32x16 acc[M];
  panel_times_rows<F, M>(at.panel, at.k, at.ahead, RowTile<M>{rows, activation_stride(at.k)}, acc);
  for (int m = 0; m < M; ++m) store_lanes(y + m * y_stride, acc[m], lanes);
}

/// Panels outside, rows inside: a panel is read from memory once and stays in the cache while all rows pass, the first
/// of which fetch the next panel. Rows are split evenly (9 = 5 + 4, not 8 + 1).
template <class F>
void matmul_panels(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                   std::ptrdiff_t y_stride) {
  const auto panel_size = static_cast<std::ptrdiff_t>(panel_bytes(w.format, w.k));
  const std::ptrdiff_t row_size = activation_stride(w.k);
  const int tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
  for (int p = panel_begin; p < panel_end; ++p) {
    PanelAt at{w.panels + panel_size * p, w.k, panel_size};
    const int left = w.n - p * kPanelRows;
    const int lanes = left < kPanelRows ? left : kPanelRows;
    float* out = y + static_cast<std::ptrdiff_t>(p - panel_begin) * kPanelRows;
    for (int tile = 0, row = 0; tile < tiles; ++tile) {
      const int count = (rows - row + tiles - tile - 1) / (tiles - tile);
      run_tile<F, kMaxTileRows>(count, at, a.blocks + row * row_size, out + row * y_stride, y_stride, lanes);
      row += count;
      at.ahead = 0;
    }
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
