#pragma once

#include <cstdint>
#include <string>

namespace aotllm {

/// What a machine has of what target cuda needs, as the CUDA runtime says it.
struct GpuMachine {
  int runtime_version = 0;   ///< CUDA that this build is linked with, e.g. 13000 for 13.0
  int driver_version = 0;    ///< newest CUDA that the driver knows, in the same form; 0 = no driver
  int device_count = 0;      ///< visible devices
  std::string device_error;  ///< why there are none, in CUDA's words; empty = there are, or nothing else is wrong
  std::string name;          ///< of the device asked for, where it exists
  int sm = 0;                ///< its compute capability, e.g. 90
  int kernel_sm = 0;  ///< what the kernels that this build has for it were compiled for, e.g. 80; 0 = it has none
};

/// Checks that this build and device `ordinal` of `machine` can run an engine built for `sm`: one for SM90 on that
/// only, one for SM80 or SM89 on any device from there on. A driver of the same major version is new enough: CUDA keeps
/// its promises within one.
///
/// Throws Error(kEngineIncompatible) or, for an ordinal that does not exist, Error(kInvalidRequest): one sentence that
/// says what is needed, what is there and what to do.
void check_gpu_requirements(const GpuMachine& machine, int ordinal, int sm);

/// What an engine cannot do without on a device; the KV cache takes what it leaves.
struct GpuMemoryNeed {
  std::int64_t weight_bytes = 0;
  std::int64_t arena_bytes = 0;  ///< of the buffers between ops
  int max_num_tokens = 0;        ///< that the arena is for
};

/// Throws Error(kEngineIncompatible) where that is more than the `free` bytes of the device, with the same in its
/// sentence.
void check_gpu_memory(const GpuMemoryNeed& need, std::int64_t free);

}  // namespace aotllm
