#include "gemm/int_kernel.cuh"

namespace aotllm::cuda {

IntKernel int_kernel_int4_group128(int rows_tile, int rows, int sub) {
  return int_kernel<IntFormat::kInt4Group128>(rows_tile, rows, sub);
}

}  // namespace aotllm::cuda
