#include "moe/moe_gemm_kernel.cuh"

namespace aotllm::cuda {

MoeGemmKernel moe_gemm_int8_row(int tokens) {
  return moe::moe_gemm_kernel_of<IntFormat::kInt8Row>(tokens);
}

}  // namespace aotllm::cuda
