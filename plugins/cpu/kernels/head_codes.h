#pragma once

#include "kernels/math.h"

// 16-bit codes of a head's query, key or value.

namespace aotllm::cpu::AOTLLM_ISA {

inline constexpr float kLargestCode16 = 32767.0f;
/// Codes of values have a bit less, which leaves one more to their weights.
inline constexpr float kLargestValueCode16 = 16383.0f;
/// The norm of a query's or key's codes stays below 46,341 = 2^15.5, rounding (at most √512 / 2) included: then a
/// product of two is below 2^31.
inline constexpr float kLargestNorm16 = 46300.0f;

inline float root(float x) {
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
}

/// value = scale · code: max(max |x| / 32767, ‖x‖ / 46300), or 0 for a head of zeros or next to nothing, so that
/// inverses are finite. NaN where x has one.
inline float head_scale(const float* x, int head_dim) {
  const float largest = largest_magnitude(x, head_dim);
  if (largest < 1e-30f) return 0.0f;
  const F32x16 inverse = set1(1.0f / largest);  // so that no square leaves the range
  F32x16 squares = set1(0.0f);
  for (int d = 0; d < head_dim; d += kLanes) {
    const F32x16 part = mul(load_lanes(x + d, head_dim - d), inverse);
    squares = fma(part, part, squares);
  }
  const float by_norm = root(reduce_add(squares)) / kLargestNorm16;
  return largest * (by_norm < 1.0f / kLargestCode16 ? 1.0f / kLargestCode16 : by_norm);
}

}  // namespace aotllm::cpu::AOTLLM_ISA
