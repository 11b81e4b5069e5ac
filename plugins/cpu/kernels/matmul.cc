#include "kernels/ops.h"

namespace aotllm::cpu::AOTLLM_ISA {

void matmul(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
            std::ptrdiff_t y_stride) {
  switch (w.format) {
    case Format::kF32:
    case Format::kF16:
      return matmul_floats(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kBF16:
      return matmul_bf16(w, a, rows, panel_begin, panel_end, y, y_stride);
    case Format::kQ2_K:
    case Format::kQ3_K:
    case Format::kQ4_K:
    case Format::kQ5_K:
    case Format::kQ6_K:
      return matmul_superblocks(w, a, rows, panel_begin, panel_end, y, y_stride);
    default:
      return matmul_blocks(w, a, rows, panel_begin, panel_end, y, y_stride);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
