#pragma once

#include <string>

namespace aotllm {

/// The compute capability that the kernels of this build are for.
inline constexpr int kKernelSm = 90;

/// What a machine has of what target cuda needs, as the CUDA runtime says it.
struct GpuMachine {
  int runtime_version = 0;  ///< CUDA that this build is linked with, e.g. 13000 for 13.0
  int driver_version = 0;   ///< newest CUDA that the driver knows, in the same form; 0 = no driver
  int device_count = 0;     ///< visible devices
  std::string name;         ///< of the device asked for, where it exists
  int sm = 0;               ///< its compute capability, e.g. 90
};

/// Checks that this build and device `ordinal` of `machine` can run an engine built for `sm`. A driver of the same
/// major version is new enough: engines hold machine code, and CUDA keeps its promises within one.
///
/// Throws Error(kEngineIncompatible) or, for an ordinal that does not exist, Error(kInvalidRequest): one sentence that
/// says what is needed, what is there and what to do.
void check_gpu_requirements(const GpuMachine& machine, int ordinal, int sm);

}  // namespace aotllm
