#pragma once

#include <cuda_runtime.h>

// The two halves of programmatic dependent launch (launch.h), for kernels that are compiled for SM80, too, where there
// is no such thing: each kernel starts when its predecessor has ended.
namespace aotllm::cuda {

/// Until the predecessor has ended and what it has written can be read.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

/// The successor may start when all blocks have come here.
__device__ inline void release_successor() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace aotllm::cuda
