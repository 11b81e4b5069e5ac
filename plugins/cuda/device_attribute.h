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

}  // namespace aotllm::cuda
