#include "kernels/block_matmul.h"
#include "kernels/ops.h"

namespace aotllm::cpu::AOTLLM_ISA {

void matmul_superblocks(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                        std::ptrdiff_t y_stride) {
  switch (w.format) {
    case Format::kQ2_K:
      return matmul_panels<FormatQ2_K>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ3_K:
      return matmul_panels<FormatQ3_K>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ4_K:
      return matmul_panels<FormatQ4_K>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ5_K:
      return matmul_panels<FormatQ5_K>(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ6_K:
      return matmul_panels<FormatQ6_K>(w, a, rows, panel_begin, panel_end, y, y_stride);
    default:
      __builtin_unreachable();  // `matmul` sends the others elsewhere
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
