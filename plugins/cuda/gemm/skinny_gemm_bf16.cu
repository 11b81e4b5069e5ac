#include "gemm/skinny_kernel.cuh"

namespace aotllm::cuda {

SkinnyKernel skinny_kernel_bf16(int rows_tile, int rows, int sub, SkinnyRole role) {
  return skinny_kernel<WeightType::kBf16>(rows_tile, rows, sub, role);
}

}  // namespace aotllm::cuda
