#include "moe/moe_gemm_kernel.cuh"

namespace aotllm::cuda {

MoeGemmKernel moe_gemm_fp8(int tokens) {
  return moe::moe_gemm_kernel_of<true>(tokens);
}

}  // namespace aotllm::cuda
