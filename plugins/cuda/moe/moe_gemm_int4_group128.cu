#include "moe/moe_gemm_kernel.cuh"

namespace aotllm::cuda {

MoeGemmKernel moe_gemm_int4_group128(int tokens) {
  return moe::moe_gemm_kernel_of<IntFormat::kInt4Group128>(tokens);
}

}  // namespace aotllm::cuda
