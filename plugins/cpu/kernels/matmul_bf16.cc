#if !defined(__AMX_BF16__)

#include "kernels/float_tiles.h"

// The matmul of bf16 weights and activations that are rounded to bf16, in the arithmetic of VDPBF16PS, also where the
// CPU lacks it; AMX has its own (matmul_amx.cc). Per pair of columns, in ascending order, acc = fma(w[2i + 1],
// x[2i + 1], acc), then acc = fma(w[2i], x[2i], acc), each rounded to nearest even (products are exact, so fma or not
// is the same), subnormal inputs and results being zeros. Source: Intel SDM volume 2, VDPBF16PS; AMD's Zen 4 does the
// same to the last bit.

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

inline I32x16 broadcast_pair(const std::uint16_t* p) {
  std::int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return set1_i32(pair);
}

#if defined(__AVX512BF16__)

template <int M, int P>
inline void add_pair(const I32x16 (&w)[P], const std::uint16_t* const (&x)[M], int k, F32x16 (&sums)[M][P]) {
  for (int m = 0; m < M; ++m) {
    const I32x16 pair = broadcast_pair(x[m] + k);
    for (int p = 0; p < P; ++p) sums[m][p] = add_dot_bf16(sums[m][p], w[p], pair);
  }
}

#else

inline F32x16 upper(I32x16 pair) {
  return from_bits(bit_and(pair, set1_i32(static_cast<std::int32_t>(0xFFFF0000))));
}
inline F32x16 lower(I32x16 pair) {
  return from_bits(shift_left<16>(pair));
}

template <int M, int P>
inline void add_pair(const I32x16 (&w)[P], const std::uint16_t* const (&x)[M], int k, F32x16 (&sums)[M][P]) {
  F32x16 half[P];
  for (int p = 0; p < P; ++p) half[p] = upper(w[p]);
  for (int m = 0; m < M; ++m) {
    const F32x16 xk = upper(broadcast_pair(x[m] + k));
    for (int p = 0; p < P; ++p) sums[m][p] = fma(half[p], xk, sums[m][p]);
  }
  for (int p = 0; p < P; ++p) half[p] = lower(w[p]);
  for (int m = 0; m < M; ++m) {
    const F32x16 xk = lower(broadcast_pair(x[m] + k));
    for (int p = 0; p < P; ++p) sums[m][p] = fma(half[p], xk, sums[m][p]);
  }
}

#endif

struct WeightsBf16 {
  template <int M, int P>
  static void tile(const FloatTile& t, const Activations& a) {
    const std::uint16_t* x[M];
    for (int m = 0; m < M; ++m) x[m] = a.bf16 + (t.row + m) * bf16_stride(t.k);
    const std::uint8_t* line = t.panel;
    F32x16 sums[M][P];
    for (int m = 0; m < M; ++m) {
      for (int p = 0; p < P; ++p) sums[m][p] = set1(0.0f);
    }
    for (int k = 0; k < t.k; k += 2, line += 64) {
      I32x16 w[P];
      for (int p = 0; p < P; ++p) w[p] = load_i32(line + t.panel_stride * p);
      if constexpr (M >= kLeastRowsToPrefetch) prefetch_next<P>(t, line);
      add_pair(w, x, k, sums);
    }
    store_tile(t, sums);
  }
};

}  // namespace

#if defined(__AVX512BF16__)

void matmul_bf16(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                 std::ptrdiff_t y_stride) {
  float_panels<WeightsBf16>(w, a, rows, panel_begin, panel_end, y, y_stride);
}

#else

/// Not inlined: nothing that computes may move out of the mode.
[[gnu::noinline]] static void matmul_in_mode(const Segment& w, const Activations& a, int rows, int panel_begin,
                                             int panel_end, float* y, std::ptrdiff_t y_stride) {
  float_panels<WeightsBf16>(w, a, rows, panel_begin, panel_end, y, y_stride);
}

// VDPBF16PS ignores MXCSR: subnormals are zeros (DAZ, FTZ), sums round to nearest even, no exception is raised.
void matmul_bf16(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                 std::ptrdiff_t y_stride) {
  constexpr unsigned kModeOfBf16 = 0x9FC0;
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(kModeOfBf16);
  matmul_in_mode(w, a, rows, panel_begin, panel_end, y, y_stride);
  _mm_setcsr(saved);
}

#endif

}  // namespace aotllm::cpu::AOTLLM_ISA

#endif
