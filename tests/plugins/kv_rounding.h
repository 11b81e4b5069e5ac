#pragma once

#include <algorithm>
#include <cmath>

#include "cpu_test_support.h"

// What a KV cache makes of K and V, as docs/engine_format.md has it.

namespace aotllm::cpu::test {

inline constexpr KvType kCodeTypes[] = {KvType::kI16, KvType::kI8};

inline float largest_of(const float* x, int head_dim) {
  float largest = 0.0f;
  for (int d = 0; d < head_dim; ++d) largest = std::max(largest, std::abs(x[d]));
  return largest;
}

/// Scales of a token's K and V in one head, as docs/engine_format.md has them, in double precision.
struct Scales {
  double k, v;
};
inline Scales scales_of(KvType type, const float* k, const float* v, int head_dim) {
  const double largest = type == KvType::kI8 ? 127 : 32767;
  double squares = 0.0;
  for (int d = 0; d < head_dim; ++d) squares += double{k[d]} * k[d];
  const double by_norm = type == KvType::kI8 ? 0.0 : std::sqrt(squares) / 46300;
  return {std::max(largest_of(k, head_dim) / largest, by_norm),
          largest_of(v, head_dim) / (type == KvType::kI8 ? 127 : 16383)};
}

/// Rounds one token's K or V to what the cache holds.
inline void to_codes_and_back(float* x, int head_dim, double scale) {
  for (int d = 0; d < head_dim && scale > 0; ++d) x[d] = static_cast<float>(scale * std::nearbyint(x[d] / scale));
}

/// Rounds to 8 significant bits, half to even.
inline void to_bf16_and_back(float* x, int head_dim) {
  for (int d = 0; d < head_dim; ++d) {
    const float step = std::ldexp(1.0f, std::ilogb(x[d]) - 7);
    x[d] = step * std::nearbyint(x[d] / step);
  }
}

}  // namespace aotllm::cpu::test
