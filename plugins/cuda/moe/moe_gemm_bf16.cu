#include "moe/moe_gemm_kernel.cuh"

namespace aotllm::cuda {

MoeGemmKernel moe_gemm_bf16(int tokens) {
  return moe::moe_gemm_kernel_of<false>(tokens);
}

}  // namespace aotllm::cuda
