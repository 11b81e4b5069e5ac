#pragma once

#include "launch.h"

namespace aotllm::cuda {

/// Of the current device. Throws Error(kInternal).
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), "device attribute");
  return value;
}

/// Of the current device, where there is one: wgmma exists on SM 9.0 only.
inline bool device_has_wgmma() {
  int device = 0;
  int major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

}  // namespace aotllm::cuda
