#include "kernels/ops.h"
#include "kernels/simd.h"

// The matmul of float formats: each output is one chain acc = fma(w[k], x[k], acc) in ascending k.

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

// `kStep` columns take `kStepBytes`; `get<J>` is column J of a step, for 16 rows.

struct WeightsF32 {
  static constexpr int kStep = 1;
  static constexpr int kStepBytes = 64;
  template <int J>
  static F32x16 get(const std::uint8_t* p) {
    return from_bits(load_i32(p));
  }
};

struct WeightsF16 {
  static constexpr int kStep = 1;
  static constexpr int kStepBytes = 32;
  template <int J>
  static F32x16 get(const std::uint8_t* p) {
    return load_f16(p);
  }
};

struct WeightsBf16 {
  static constexpr int kStep = 2;
  static constexpr int kStepBytes = 64;
  template <int J>
  static F32x16 get(const std::uint8_t* p) {
    const I32x16 pair = load_i32(p);
    return from_bits(J == 0 ? shift_left<16>(pair) : bit_and(pair, set1_i32(static_cast<std::int32_t>(0xFFFF0000))));
  }
};

template <class W, int J, int M, int P>
inline void add_column(const std::uint8_t* const (&panels)[P], std::ptrdiff_t offset, const float* const (&x)[M], int k,
                       F32x16 (&acc)[M][P]) {
  F32x16 w[P];
  for (int p = 0; p < P; ++p) w[p] = W::template get<J>(panels[p] + offset);
  for (int m = 0; m < M; ++m) {
    const F32x16 xk = set1(x[m][k]);
    for (int p = 0; p < P; ++p) acc[m][p] = fma(w[p], xk, acc[m][p]);
  }
}

/// M rows × P panels: M · P independent chains hide the latency of fma.
template <class W, int M, int P>
void float_tile(const std::uint8_t* panel, std::size_t stride, int k, const Activations& a, int row, float* y,
                std::ptrdiff_t y_stride, int lanes) {
  const std::uint8_t* panels[P];
  for (int p = 0; p < P; ++p) panels[p] = panel + stride * static_cast<std::size_t>(p);
  const float* x[M];
  for (int m = 0; m < M; ++m) x[m] = a.x + (row + m) * a.x_stride;

  F32x16 acc[M][P];
  for (int m = 0; m < M; ++m) {
    for (int p = 0; p < P; ++p) acc[m][p] = set1(0.0f);
  }
  int i = 0;
  std::ptrdiff_t offset = 0;
  for (; i + W::kStep <= k; i += W::kStep, offset += W::kStepBytes) {
    add_column<W, 0, M, P>(panels, offset, x, i, acc);
    if constexpr (W::kStep == 2) add_column<W, 1, M, P>(panels, offset, x, i + 1, acc);
  }
  if (i < k) add_column<W, 0, M, P>(panels, offset, x, i, acc);
  for (int m = 0; m < M; ++m) {
    for (int p = 0; p < P; ++p) {
      store_lanes(y + (row + m) * y_stride + p * kPanelRows, acc[m][p], lanes - p * kPanelRows);
    }
  }
}

/// All rows of one panel.
template <class W>
void float_rows(const std::uint8_t* panel, int k, const Activations& a, int rows, float* y, std::ptrdiff_t y_stride,
                int lanes) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) float_tile<W, 4, 1>(panel, 0, k, a, row, y, y_stride, lanes);
  switch (rows - row) {
    case 3:
      return float_tile<W, 3, 1>(panel, 0, k, a, row, y, y_stride, lanes);
    case 2:
      return float_tile<W, 2, 1>(panel, 0, k, a, row, y, y_stride, lanes);
    case 1:
      return float_tile<W, 1, 1>(panel, 0, k, a, row, y, y_stride, lanes);
    default:
      return;
  }
}

template <class W>
void float_panels(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                  std::ptrdiff_t y_stride) {
  const std::size_t stride = panel_bytes(w.format, w.k);
  for (int p = panel_begin; p < panel_end;) {
    const std::uint8_t* panel = w.panels + stride * static_cast<std::size_t>(p);
    float* out = y + static_cast<std::ptrdiff_t>(p - panel_begin) * kPanelRows;
    const int lanes = w.n - p * kPanelRows;
    if (rows == 1 && p + 4 <= panel_end) {
      float_tile<W, 1, 4>(panel, stride, w.k, a, 0, out, y_stride, lanes);
      p += 4;
    } else if (rows == 2 && p + 2 <= panel_end) {
      float_tile<W, 2, 2>(panel, stride, w.k, a, 0, out, y_stride, lanes);
      p += 2;
    } else {
      float_rows<W>(panel, w.k, a, rows, out, y_stride, lanes);
      p += 1;
    }
  }
}

}  // namespace

void matmul_floats(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                   std::ptrdiff_t y_stride) {
  switch (w.format) {
    case Format::kF32:
      return float_panels<WeightsF32>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kF16:
      return float_panels<WeightsF16>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kBF16:
      return float_panels<WeightsBf16>(w, a, rows, panel_begin, panel_end, y, y_stride);
    default:
      __builtin_unreachable();  // `matmul` sends the others elsewhere
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
