#include "kernels/block_formats.h"
#include "kernels/ops.h"

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

inline float f16_at(const std::uint8_t* p) {
  std::uint16_t half;
  __builtin_memcpy(&half, p, sizeof half);
  return _cvtsh_ss(half);
}

/// The element of `row` in 16 lanes.
inline float lane(F32x16 x, int row) {
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  return lanes[row];
}

template <class F>
void dequantize_blocks(const std::uint8_t* panel, int k, int row, float factor, float* out) {
  using Codes = typename F::Codes;
  using Scales = typename F::Scales;
  constexpr int kBlockBytes = Codes::kLines * kLineBytes;
  constexpr int kPerGroup = 32 / Scales::kGroups;
  const int blocks = k / 32;
  const std::uint8_t* scales = panel + static_cast<std::ptrdiff_t>(blocks) * kBlockBytes;
  for (int i = 0; i < k; i += kPerGroup) {
    const int block = i / 32;
    const int group = i % 32 / kPerGroup;
    const std::uint8_t* lines = panel + static_cast<std::ptrdiff_t>(block) * kBlockBytes;
    const auto at = Scales::at(scales, block);
    const float scale = lane(at.scale(group), row);
    float min = 0.0f;
    if constexpr (Scales::kAffine) min = lane(at.min(group), row);
    for (int j = 0; j < kPerGroup; ++j) {
      const float product = scale * static_cast<float>(Codes::at(lines, row, i % 32 + j) - F::kZero);
      out[i + j] = factor * (Scales::kAffine ? product + min : product);
    }
  }
}

void dequantize_floats(Format format, const std::uint8_t* panel, int k, int row, float factor, float* out) {
  for (int i = 0; i < k; ++i) {
    float value;
    if (format == Format::kF32) {
      __builtin_memcpy(&value, panel + (i * kPanelRows + row) * 4, 4);
    } else if (format == Format::kF16) {
      value = f16_at(panel + (i * kPanelRows + row) * 2);
    } else {
      std::uint16_t upper;
      __builtin_memcpy(&upper, panel + (i / 2 * kPanelRows + row) * 4 + i % 2 * 2, 2);
      value = __builtin_bit_cast(float, static_cast<std::uint32_t>(upper) << 16);
    }
    out[i] = factor * value;
  }
}

}  // namespace

void dequantize_row(const Segment& w, int row, float factor, float* out) {
  const std::uint8_t* panel = w.panels + panel_bytes(w.format, w.k) * static_cast<std::size_t>(row / kPanelRows);
  const int r = row % kPanelRows;
  switch (w.format) {
    case Format::kQ4_0:
      return dequantize_blocks<FormatQ4_0>(panel, w.k, r, factor, out);
    case Format::kQ4_1:
      return dequantize_blocks<FormatQ4_1>(panel, w.k, r, factor, out);
    case Format::kQ5_0:
      return dequantize_blocks<FormatQ5_0>(panel, w.k, r, factor, out);
    case Format::kQ5_1:
      return dequantize_blocks<FormatQ5_1>(panel, w.k, r, factor, out);
    case Format::kQ8_0:
      return dequantize_blocks<FormatQ8_0>(panel, w.k, r, factor, out);
    case Format::kQ2_K:
      return dequantize_blocks<FormatQ2_K>(panel, w.k, r, factor, out);
    case Format::kQ3_K:
      return dequantize_blocks<FormatQ3_K>(panel, w.k, r, factor, out);
    case Format::kQ4_K:
      return dequantize_blocks<FormatQ4_K>(panel, w.k, r, factor, out);
    case Format::kQ5_K:
      return dequantize_blocks<FormatQ5_K>(panel, w.k, r, factor, out);
    case Format::kQ6_K:
      return dequantize_blocks<FormatQ6_K>(panel, w.k, r, factor, out);
    case Format::kIQ4_NL:
      return dequantize_blocks<FormatIQ4_NL>(panel, w.k, r, factor, out);
    case Format::kMXFP4:
      return dequantize_blocks<FormatMXFP4>(panel, w.k, r, factor, out);
    case Format::kQ8_F32:
      return dequantize_blocks<FormatQ8_F32>(panel, w.k, r, factor, out);
    case Format::kQ4_0_G64:
      return dequantize_blocks<FormatQ4_0_G64>(panel, w.k, r, factor, out);
    case Format::kQ4_0_G128:
      return dequantize_blocks<FormatQ4_0_G128>(panel, w.k, r, factor, out);
    case Format::kQ4_1_G64:
      return dequantize_blocks<FormatQ4_1_G64>(panel, w.k, r, factor, out);
    case Format::kQ4_1_G128:
      return dequantize_blocks<FormatQ4_1_G128>(panel, w.k, r, factor, out);
    default:
      return dequantize_floats(w.format, panel, w.k, r, factor, out);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
