#include "compiled_sm.h"

#include <cuda_runtime.h>

namespace aotllm::cuda {
namespace {

__global__ void probe() {}

}  // namespace

int compiled_sm() {
  cudaFuncAttributes attributes{};
  const bool found = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe)) == cudaSuccess;
  cudaGetLastError();  // is not anybody's later
  return found ? attributes.ptxVersion : 0;
}

}  // namespace aotllm::cuda
