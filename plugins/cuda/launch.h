#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace aotllm::cuda {

/// Throws Error naming `what` where `status` is a failure: kEngineIncompatible where memory is short, else kInternal.
void check(cudaError_t status, const char* what);

/// A stream, and how kernels join it.
struct Stream {
  cudaStream_t handle = nullptr;
  /// Kernels start before their predecessor ends (programmatic dependent launch). Every kernel of this folder waits for
  /// it (griddepcontrol.wait) before it touches what another kernel writes or reads, and lets its own successor start
  /// (griddepcontrol.launch_dependents) as soon as all its blocks run: what comes before the wait (loads of weights,
  /// set-up of barriers) overlaps with the predecessor.
  bool programmatic = false;
  /// The compute capability whose instructions kernels may use: from 90 on those of SM90, else those of SM80 only,
  /// which every later device runs, too. Programmatic launch needs 90.
  int sm = 90;
};

/// Launches `kernel` and checks that it was accepted. All kernels ask for the same split of L1 and shared memory: a
/// multiprocessor has to run dry before it can change it, and the blocks of GEMMs need all of it.
template <class... Parameters, class... Args>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, const Stream& stream,
            Args&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.handle;
  config.attrs = &attribute;
  config.numAttrs = stream.programmatic ? 1 : 0;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "carve-out of shared memory");
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), "kernel launch");
}

}  // namespace aotllm::cuda
