#include "moe/moe_gemm_kernel.cuh"

namespace aotllm::cuda {

MoeGemmKernel moe_gemm_int4_group32(int tokens) {
  return moe::moe_gemm_kernel_of<IntFormat::kInt4Group32>(tokens);
}

}  // namespace aotllm::cuda
