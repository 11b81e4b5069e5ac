#include "gemm/int_kernel.cuh"

namespace aotllm::cuda {

IntKernel int_kernel_int8_group32(int rows_tile, int rows, int sub) {
  return int_kernel<IntFormat::kInt8Group32>(rows_tile, rows, sub);
}

}  // namespace aotllm::cuda
