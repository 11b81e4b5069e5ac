#include "launch.h"

#include <string>

#include "aotllm/errors.h"

namespace aotllm::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(ErrorKind::kInternal, std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

}  // namespace aotllm::cuda
