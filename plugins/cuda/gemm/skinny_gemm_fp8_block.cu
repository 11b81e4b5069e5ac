#include "gemm/skinny_kernel.cuh"

namespace aotllm::cuda {

SkinnyKernel skinny_kernel_fp8_block(int rows_tile, int rows, int sub, SkinnyRole role) {
  return skinny_kernel<WeightType::kFp8Block>(rows_tile, rows, sub, role);
}

}  // namespace aotllm::cuda
