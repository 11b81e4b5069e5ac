#include "launch.h"

#include <string>

#include "aotllm/errors.h"

namespace aotllm::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // is no failure of what comes next
    throw Error(ErrorKind::kEngineIncompatible,
                std::string("CUDA: ") + what + ": " + cudaGetErrorString(status) +
                    "; free some memory of the device and the host, give the KV cache less (--kv-cache-memory), or "
                    "build the engine with --fp8, for more ranks (--tp) or with a smaller --max-num-tokens");
  }
  throw Error(ErrorKind::kInternal, std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

}  // namespace aotllm::cuda
