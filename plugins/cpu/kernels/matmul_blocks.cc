#include "kernels/block_matmul.h"
#include "kernels/ops.h"

namespace aotllm::cpu::AOTLLM_ISA {

void matmul_blocks(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                   std::ptrdiff_t y_stride) {
  switch (w.format) {
    case Format::kQ4_0:
      return matmul_panels<FormatQ4_0>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ4_1:
      return matmul_panels<FormatQ4_1>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ5_0:
      return matmul_panels<FormatQ5_0>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ5_1:
      return matmul_panels<FormatQ5_1>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ8_0:
      return matmul_panels<FormatQ8_0>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kIQ4_NL:
      return matmul_panels<FormatIQ4_NL>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kMXFP4:
      return matmul_panels<FormatMXFP4>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ8_F32:
      return matmul_panels<FormatQ8_F32>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ4_0_G64:
      return matmul_panels<FormatQ4_0_G64>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ4_0_G128:
      return matmul_panels<FormatQ4_0_G128>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ4_1_G64:
      return matmul_panels<FormatQ4_1_G64>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ4_1_G128:
      return matmul_panels<FormatQ4_1_G128>(w, a, rows, panel_begin, panel_end, y, y_stride);
    default:
      __builtin_unreachable();  // `matmul` sends the others elsewhere
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
