#include "gemm/int_kernel.cuh"

namespace aotllm::cuda {

IntKernel int_kernel_int8_row(int rows_tile, int rows, int sub) {
  return int_kernel<IntFormat::kInt8Row>(rows_tile, rows, sub);
}

}  // namespace aotllm::cuda
