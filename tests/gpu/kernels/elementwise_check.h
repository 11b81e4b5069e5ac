#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>

#include "reference.h"

// How far rounded results may lie from float64 ones.
namespace aotllm::cuda {

inline constexpr double kHalfUlpBf16 = 1.0 / 256;   // relative
inline constexpr double kHalfUlpFp8 = 1.0 / 16;     // relative
inline constexpr double kHalfStepFp8 = 1.0 / 1024;  // absolute, below 2^-6

/// The largest error of a comparison as a multiple of what is allowed, and where.
struct Worst {
  double ratio = 0.0;
  std::int64_t index = -1;
  double got = 0.0;
  double want = 0.0;

  void add(std::int64_t i, double value, double reference, double allowed) {
    const double r = std::isfinite(value) ? std::abs(value - reference) / allowed : INFINITY;
    if (r <= ratio) return;
    *this = {r, i, value, reference};
  }
  /// Fails the test, saying where, if an error is over what is allowed.
  void expect(const std::string& name) const {
    EXPECT_LE(ratio, 1.0) << name << ": index " << index << " is " << got << ", should be " << want;
  }
};

/// All bytes of `bytes` are still the poison.
inline bool untouched(std::span<const std::uint8_t> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::uint8_t byte) { return byte == 0xFF; });
}

template <class T>
std::span<const std::uint8_t> bytes_from(const std::vector<T>& values, std::size_t first) {
  return {reinterpret_cast<const std::uint8_t*>(values.data() + first), (values.size() - first) * sizeof(T)};
}

}  // namespace aotllm::cuda
