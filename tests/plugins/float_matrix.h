#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "cpu_test_support.h"

namespace aotllm::cpu::test {

inline constexpr Format kFloatFormats[] = {Format::kF32, Format::kF16, Format::kBF16};

/// A float matrix in panels, and its values.
struct FloatMatrix {
  FloatMatrix(Format f, int rows, int columns, Random& random)
      : format(f),
        n(rows),
        k(columns),
        panels(bytes_needed()),
        values(normal(random, static_cast<std::size_t>(n * k))) {
    for (int r = 0; r < n; ++r) {
      for (int i = 0; i < k; ++i) put(r, i, values[static_cast<std::size_t>(r * k + i)]);
    }
  }
  std::size_t bytes_needed() const { return static_cast<std::size_t>((n + 15) / 16) * panel_bytes(format, k); }

  void put(int r, int i, float& value) {
    std::uint8_t* panel = panels.data() + static_cast<std::size_t>(r / 16) * panel_bytes(format, k);
    const int lane = r % 16;
    if (format == Format::kF32) {
      std::memcpy(panel + (i * 16 + lane) * 4, &value, 4);
      return;
    }
    // A value with 8 significant bits is exact in both 16-bit formats.
    value = float_of(bits_of(value) & 0xFFFF0000u);
    if (format == Format::kBF16) {
      const auto upper = static_cast<std::uint16_t>(bits_of(value) >> 16);
      std::memcpy(panel + (i / 2 * 16 + lane) * 4 + i % 2 * 2, &upper, 2);
      return;
    }
    std::uint16_t half = 0;
    if (std::fabs(value) >= 0x1p-14f) {
      const std::uint32_t b = bits_of(value);
      half = static_cast<std::uint16_t>((b >> 16 & 0x8000) | (((b >> 23 & 0xFF) - 112) << 10) | (b >> 13 & 0x3FF));
    }
    value = half_to_float(half);
    std::memcpy(panel + (i * 16 + lane) * 2, &half, 2);
  }

  Segment segment() const { return {format, n, k, panels.data()}; }

  Format format;
  int n, k;
  AlignedBytes panels;
  std::vector<float> values;
};

}  // namespace aotllm::cpu::test
