#include <utility>

#include "sm80/gemm_kernel.cuh"

namespace aotllm::cuda::sm80 {

Kernel fp8_kernel(int shape) {
  return kernel_of<Fp8Type>(shape, std::make_integer_sequence<int, kNumTileShapes>());
}

}  // namespace aotllm::cuda::sm80
