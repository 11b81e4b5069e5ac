#pragma once

namespace aotllm::cuda {

/// threadIdx.x / 128, by whole warps. The shuffle tells the compiler that the threads of a warp have one value, so that
/// descriptors that depend on it stay in uniform registers: moving them there before each product makes the tensor
/// cores wait, for 5 % of the main loop of a tile GEMM.
__device__ inline int uniform_warpgroup() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
}

}  // namespace aotllm::cuda
