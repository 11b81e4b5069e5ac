#include "gemm/skinny_kernel.cuh"

namespace aotllm::cuda {

SkinnyKernel skinny_kernel_chained(int rows_tile, int rows, int sub, SkinnyRole role) {
  return skinny_kernel<WeightType::kFp8, true>(rows_tile, rows, sub, role);
}

}  // namespace aotllm::cuda
