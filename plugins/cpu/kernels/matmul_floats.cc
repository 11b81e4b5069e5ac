#include "kernels/float_tiles.h"

// The matmul of f32 and f16: each output is one chain acc = fma(w[k], x[k], acc) in ascending k.

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

struct LoadF32 {
  static constexpr int kBytes = 64;  ///< of a column of 16 rows
  static F32x16 load(const std::uint8_t* p) { return from_bits(load_i32(p)); }
};

struct LoadF16 {
  static constexpr int kBytes = 32;
  static F32x16 load(const std::uint8_t* p) { return load_f16(p); }
};

template <class Load>
struct Weights {
  template <int M, int P>
  static void tile(const FloatTile& t, const Activations& a) {
    const float* x[M];
    for (int m = 0; m < M; ++m) x[m] = a.x + (t.row + m) * a.x_stride;
    const std::uint8_t* column = t.panel;
    F32x16 sums[M][P];
    for (int m = 0; m < M; ++m) {
      for (int p = 0; p < P; ++p) sums[m][p] = set1(0.0f);
    }
    for (int k = 0; k < t.k; ++k, column += Load::kBytes) {
      F32x16 w[P];
      for (int p = 0; p < P; ++p) w[p] = Load::load(column + t.panel_stride * p);
      if constexpr (M >= kLeastRowsToPrefetch) prefetch_next<P>(t, column);
      for (int m = 0; m < M; ++m) {
        const F32x16 xk = set1(x[m][k]);
        for (int p = 0; p < P; ++p) sums[m][p] = fma(w[p], xk, sums[m][p]);
      }
    }
    store_tile(t, sums);
  }
};

}  // namespace

void matmul_floats(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                   std::ptrdiff_t y_stride) {
  if (w.format == Format::kF32) {
    float_panels<Weights<LoadF32>>(w, a, rows, panel_begin, panel_end, y, y_stride);
  } else {
    float_panels<Weights<LoadF16>>(w, a, rows, panel_begin, panel_end, y, y_stride);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
