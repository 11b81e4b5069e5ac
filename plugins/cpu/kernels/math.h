#pragma once

#include "kernels/simd.h"

// exp, tanh, norms and quantization on 16 lanes. Relative error below 2e-7; limits at ±inf are exact, NaN stays NaN.

namespace aotllm::cpu::AOTLLM_ISA {

/// The bits of |x|: magnitudes order like them, NaN above all.
inline I32x16 magnitude_bits(F32x16 x) {
  return bit_and(bits(x), set1_i32(INT32_MAX));
}

/// max |x| over lanes; NaN where one is NaN.
inline float largest_magnitude(F32x16 x) {
  return __builtin_bit_cast(float, reduce_max(magnitude_bits(x)));
}

/// The same over x[n].
inline float largest_magnitude(const float* x, int n) {
  I32x16 top = set1_i32(0);
  for (int i = 0; i < n; i += kLanes) top = max(top, magnitude_bits(load_lanes(x + i, n - i)));
  return __builtin_bit_cast(float, reduce_max(top));
}

/// Round to nearest even; INT32_MIN for what does not fit.
inline std::int32_t to_i32(float x) {
  return _mm_cvtss_si32(_mm_set_ss(x));
}

/// round_half_even(x / scale), clamped to [-limit, limit]; zeros where the scale is 0, -limit for a NaN.
inline I32x16 to_codes(F32x16 x, float scale, float limit) {
  const F32x16 scaled = scale == 0.0f ? set1(0.0f) : div(x, set1(scale));  // a scale may underflow to 0
  return to_i32(min(max(scaled, set1(-limit)), set1(limit)));
}

/// 1 / sqrt(mean(x²) + eps) over x[n]: sixteen lane-wise sums in ascending i, then the tree of `reduce_add`.
inline float rms_factor(const float* x, float eps, int n) {
  F32x16 squares = set1(0.0f);
  for (int i = 0; i < n; i += kLanes) {
    const F32x16 v = load_lanes(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const float mean = reduce_add(squares) / static_cast<float>(n);
  return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps)));
}

/// e^x = 2^n · (1 + e), |x - n·ln 2| ≤ ln(2) / 2.
struct ExpParts {
  F32x16 n;
  F32x16 e;
};

inline ExpParts exp_parts(F32x16 x) {
  const F32x16 n = round_even(mul(x, set1(0x1.715476p+0f)));  // log2(e)
  F32x16 r = fma(n, set1(-0x1.62e43p-1f), x);                 // ln 2, in two parts
  r = fma(n, set1(0x1.05c61p-29f), r);
  // Taylor series of e^r - 1; the first term left out is r^8 / 8! < 6e-9.
  F32x16 p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  return {n, fma(mul(r, r), p, r)};
}

/// 2^n for n in [-126, 127].
inline F32x16 power_of_two(I32x16 n) {
  return from_bits(shift_left<23>(add(n, set1_i32(127))));
}

inline F32x16 exp(F32x16 x) {
  // Beyond these limits the result is 0 or inf; `max` and `min` keep a NaN in their second operand.
  const F32x16 clamped = min(set1(89.0f), max(set1(-105.0f), x));
  const ExpParts parts = exp_parts(clamped);
  // Two steps reach subnormal results and overflow to inf.
  const I32x16 n = to_i32(parts.n);
  const I32x16 half = shift_right<1>(n);
  return mul(mul(add(set1(1.0f), parts.e), power_of_two(half)), power_of_two(sub(n, half)));
}

/// tanh |x| = -t / (2 + t) with t = e^(-2|x|) - 1, which loses nothing near 0.
inline F32x16 tanh(F32x16 x) {
  const I32x16 sign = bit_and(bits(x), set1_i32(INT32_MIN));
  const F32x16 magnitude = from_bits(bit_and(bits(x), set1_i32(INT32_MAX)));
  const F32x16 y = max(set1(-40.0f), mul(set1(-2.0f), magnitude));
  const ExpParts parts = exp_parts(y);
  const F32x16 scale = power_of_two(to_i32(parts.n));
  const F32x16 t = fma(scale, parts.e, sub(scale, set1(1.0f)));
  const F32x16 result = div(sub(set1(0.0f), t), add(set1(2.0f), t));
  return from_bits(bit_or(bits(result), sign));
}

}  // namespace aotllm::cpu::AOTLLM_ISA
