#include "runner/cuda/device.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "compiled_sm.h"
#include "launch.h"
#include "runner/gpu_requirements.h"

namespace aotllm::cuda {
namespace {

/// The machine; where device `ordinal` exists, it becomes the calling thread's.
GpuMachine machine_with(int ordinal) {
  GpuMachine machine;
  machine.runtime_version = CUDART_VERSION;
  check(cudaDriverGetVersion(&machine.driver_version), "version of the driver");
  // Whatever is wrong leaves no device. Drivers that are missing or too old are known by their version.
  if (const cudaError_t status = cudaGetDeviceCount(&machine.device_count); status != cudaSuccess) {
    machine.device_count = 0;
    if (status != cudaErrorNoDevice) machine.device_error = cudaGetErrorString(status);
  }
  if (ordinal < 0 || ordinal >= machine.device_count) return machine;
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "properties of the device");
  machine.name = properties.name;
  machine.sm = properties.major * 10 + properties.minor;
  check(cudaSetDevice(ordinal), "choice of the device");
  machine.kernel_sm = compiled_sm();
  return machine;
}

}  // namespace

void open_device(int ordinal, int sm) {
  check_gpu_requirements(machine_with(ordinal), ordinal, sm);
}

std::int64_t free_device_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "free memory of the device");
  return static_cast<std::int64_t>(free);
}

std::int64_t free_cache_bytes() {
  constexpr std::int64_t kReserve = std::int64_t{512} << 20;
  return std::max<std::int64_t>(free_device_bytes() - kReserve, 0);
}

}  // namespace aotllm::cuda
