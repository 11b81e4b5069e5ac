#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu_test_support.h"

// Packed panels read byte by byte, as docs/engine_format.md describes them. Nothing here is shared with the kernels.

namespace aotllm::cpu::test {

/// A row of the format table.
struct Layout {
  Format format;
  int bits;          ///< of a code; float formats: 0
  int scale_groups;  ///< per block of 32
  char scale_type;   ///< 'h' float16, 'f' float32, 'u' and 'i' bytes of two levels
  bool affine;
  int zero;
  int span = 32;  ///< columns that share float16 scales
};

inline const std::array<Layout, 17>& block_layouts() {
  static const std::array<Layout, 17> all = {{
      {Format::kQ4_0, 4, 1, 'h', false, 8},
      {Format::kQ4_1, 4, 1, 'h', true, 0},
      {Format::kQ5_0, 5, 1, 'h', false, 16},
      {Format::kQ5_1, 5, 1, 'h', true, 0},
      {Format::kQ8_0, 8, 1, 'h', false, 0},
      {Format::kQ2_K, 4, 2, 'u', true, 0},
      {Format::kQ3_K, 4, 2, 'i', false, 4},
      {Format::kQ4_K, 4, 1, 'u', true, 0},
      {Format::kQ5_K, 5, 1, 'u', true, 0},
      {Format::kQ6_K, 6, 2, 'i', false, 32},
      {Format::kIQ4_NL, 4, 1, 'f', false, 0},
      {Format::kMXFP4, 4, 1, 'f', false, 0},
      {Format::kQ8_F32, 8, 2, 'f', false, 0},
      {Format::kQ4_0_G64, 4, 1, 'h', false, 8, 64},
      {Format::kQ4_0_G128, 4, 1, 'h', false, 8, 128},
      {Format::kQ4_1_G64, 4, 1, 'h', true, 0, 64},
      {Format::kQ4_1_G128, 4, 1, 'h', true, 0, 128},
  }};
  return all;
}

/// Random panels of a block format: every code and byte, scales in a sane range.
class PackedMatrix {
 public:
  PackedMatrix(const Layout& layout, int n, int k, Random& random)
      : layout_(layout), n_(n), k_(k), panel_bytes_(expected_panel_bytes()), bytes_(panels() * panel_bytes_) {
    std::uniform_int_distribution<int> byte(0, 255);
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_.data()[i] = static_cast<std::uint8_t>(byte(random));
    for (std::size_t p = 0; p < panels(); ++p) fill_scales(p, random);
  }

  Segment segment() const { return {layout_.format, n_, k_, bytes_.data()}; }
  std::size_t panels() const { return (static_cast<std::size_t>(n_) + 15) / 16; }
  std::size_t panel_bytes() const { return panel_bytes_; }

  /// Code of row n, column k, less the zero; looked up where the format does.
  int code(int n, int k) const {
    static constexpr int kIq4Nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static constexpr int kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const std::uint8_t* block = panel(n) + k / 32 * 64 * layout_.bits;
    const int group = k % 32 / 4;
    const int byte = 4 * (n % 16) + k % 4;
    if (layout_.bits == 8) return static_cast<std::int8_t>(block[64 * group + byte]);
    int u = block[64 * (group / 2) + byte] >> (group % 2 == 0 ? 0 : 4) & 15;
    if (layout_.bits == 5) u += (block[64 * 4 + byte] >> group & 1) * 16;
    if (layout_.bits == 6) u += (block[64 * (4 + group / 4) + byte] >> 2 * (group % 4) & 3) * 16;
    if (layout_.format == Format::kIQ4_NL) return kIq4Nl[u];
    if (layout_.format == Format::kMXFP4) return kE2m1Doubled[u];
    return u - layout_.zero;
  }

  /// Scale of row n at column k.
  float scale(int n, int k) const { return scale_or_min(n, k, scale_group(k)); }
  /// Min of row n at column k; 0 for symmetric formats.
  float min(int n, int k) const {
    return layout_.affine ? scale_or_min(n, k, layout_.scale_groups + scale_group(k)) : 0.0f;
  }

  const Layout& layout() const { return layout_; }
  int n() const { return n_; }
  int k() const { return k_; }

 private:
  std::size_t expected_panel_bytes() const {
    const int per_block = layout_.scale_groups * (layout_.affine ? 2 : 1);
    const int blocks = k_ / 32;
    int bytes = blocks * 64 * layout_.bits;
    switch (layout_.scale_type) {
      case 'h':
        bytes += spans() * per_block * 32;
        break;
      case 'f':
        bytes += blocks * per_block * 64;
        break;
      default:
        bytes += (k_ + 255) / 256 * (8 * per_block * 16 + (layout_.affine ? 64 : 32));
        break;
    }
    return static_cast<std::size_t>((bytes + 63) / 64 * 64);
  }

  const std::uint8_t* panel(int n) const { return bytes_.data() + panel_bytes_ * static_cast<std::size_t>(n / 16); }
  std::uint8_t* scale_area(std::size_t p) { return bytes_.data() + panel_bytes_ * p + k_ / 32 * 64 * layout_.bits; }
  int spans() const { return (k_ + layout_.span - 1) / layout_.span; }
  int scale_group(int k) const { return layout_.scale_groups == 1 ? 0 : k % 32 / 16; }

  float scale_or_min(int n, int k, int index) const {
    const std::uint8_t* area = panel(n) + k_ / 32 * 64 * layout_.bits;
    const int per_block = layout_.scale_groups * (layout_.affine ? 2 : 1);
    const int lane = n % 16;
    if (layout_.scale_type == 'f') {
      float value;
      std::memcpy(&value, area + ((k / 32 * per_block + index) * 16 + lane) * 4, 4);
      return value;
    }
    if (layout_.scale_type == 'h') return half_at(area + ((k / layout_.span * per_block + index) * 16 + lane) * 2);
    const int factor_bytes = layout_.affine ? 64 : 32;
    const std::uint8_t* super = area + k / 256 * (factor_bytes + 8 * per_block * 16);
    const std::uint8_t byte = super[factor_bytes + (k % 256 / 32 * per_block + index) * 16 + lane];
    const int integer = layout_.scale_type == 'i' ? static_cast<std::int8_t>(byte) : byte;
    const bool is_min = index >= layout_.scale_groups;
    return half_at(super + (is_min ? 32 : 0) + lane * 2) * static_cast<float>(integer);
  }

  static float half_at(const std::uint8_t* p) {
    std::uint16_t h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
  }

  /// Overwrites the float scales with values in ±[2^-8, 2^-4]; integer bytes stay random.
  void fill_scales(std::size_t p, Random& random) {
    std::uniform_int_distribution<int> exponent(7, 11);
    std::uniform_int_distribution<int> rest(0, 1023);
    std::uniform_int_distribution<int> sign(0, 1);
    const auto half = [&] {
      return static_cast<std::uint16_t>(sign(random) << 15 | exponent(random) << 10 | rest(random));
    };
    std::uint8_t* area = scale_area(p);
    const int per_block = layout_.scale_groups * (layout_.affine ? 2 : 1);
    const int super_bytes = (layout_.affine ? 64 : 32) + 8 * per_block * 16;
    switch (layout_.scale_type) {
      case 'h':
        for (int i = 0; i < spans() * per_block * 16; ++i) put(area + i * 2, half());
        break;
      case 'f':
        for (int i = 0; i < k_ / 32 * per_block * 16; ++i) put(area + i * 4, half_to_float(half()) * 1.1f);
        break;
      default:
        for (int s = 0; s < (k_ + 255) / 256; ++s) {
          for (int i = 0; i < (layout_.affine ? 32 : 16); ++i) put(area + s * super_bytes + i * 2, half());
        }
    }
  }

  template <class T>
  static void put(std::uint8_t* p, T value) {
    std::memcpy(p, &value, sizeof value);
  }

  Layout layout_;
  int n_;
  int k_;
  std::size_t panel_bytes_;
  AlignedBytes bytes_;
};

/// Quantized activation rows with any codes in [-127, 127] and factors in [0, 2^14], the extremes often.
class QuantizedRows {
 public:
  QuantizedRows(int rows, int k, Random& random)
      : rows_(rows),
        k_(k),
        stride_(activation_stride(k)),
        bytes_(static_cast<std::size_t>(rows * stride_) * sizeof(ActivationBlock)) {
    std::uniform_int_distribution<int> code(-160, 160);
    std::uniform_int_distribution<int> factor(-2'000, kLargestFactor + 2'000);
    std::normal_distribution<float> scale(0.0f, 1e-6f);
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < k; ++i) {
        at(row, i).q[i % 32] = static_cast<std::int8_t>(std::clamp(code(random), -127, 127));
        if (i % 16 == 0) set_factor(at(row, i), i % 32 / 16, std::clamp(factor(random), 0, kLargestFactor));
      }
      row_scale(&at(row, 0), k) = scale(random);
    }
    set_sums();
  }

  /// All codes the same, all factors the largest.
  void fill(std::int8_t q) {
    for (int row = 0; row < rows_; ++row) {
      for (int i = 0; i < k_; i += 32) {
        std::memset(at(row, i).q, q, 32);
        for (int half = 0; half < 2; ++half) set_factor(at(row, i), half, kLargestFactor);
      }
    }
    set_sums();
  }

  Activations activations() const { return {nullptr, 0, blocks()}; }
  int q(int row, int i) const { return at(row, i).q[i % 32]; }
  int factor(int row, int i) const { return at(row, i).factors[i % 32 / 16]; }
  float scale(int row) const { return row_scale(&at(row, 0), k_); }

 private:
  static void set_factor(ActivationBlock& block, int half, int factor) {
    block.factors[half] = static_cast<std::int16_t>(factor);
    block.scales[half] = static_cast<float>(factor);
  }

  ActivationBlock* blocks() const {
    return reinterpret_cast<ActivationBlock*>(const_cast<std::uint8_t*>(bytes_.data()));
  }
  ActivationBlock& at(int row, int i) const { return blocks()[row * stride_ + i / 32]; }

  void set_sums() {
    for (int row = 0; row < rows_; ++row) {
      for (int i = 0; i < k_; i += 32) {
        ActivationBlock& block = at(row, i);
        int sums[2] = {};
        for (int j = 0; j < 32; ++j) sums[j / 16] += block.q[j];
        block.sum = static_cast<float>(block.factors[0] * sums[0] + block.factors[1] * sums[1]);
        for (int half = 0; half < 2; ++half) {
          block.minus_8_sums[half] = -8 * sums[half];
          block.minus_128_sums[half] = -128 * sums[half];
        }
      }
    }
  }

  int rows_;
  int k_;
  std::ptrdiff_t stride_;
  AlignedBytes bytes_;
};

}  // namespace aotllm::cpu::test
