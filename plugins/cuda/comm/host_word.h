#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch.h"

namespace aotllm::cuda {

/// A word on the host that all devices read; 0 at first.
class HostWord {
 public:
  HostWord() {
    check(cudaHostAlloc(&word_, sizeof(*word_), cudaHostAllocMapped | cudaHostAllocPortable), "page-locked memory");
    set(0);
  }
  HostWord(const HostWord&) = delete;
  HostWord& operator=(const HostWord&) = delete;
  ~HostWord() { cudaFreeHost(word_); }

  void set(std::uint32_t value) noexcept { *static_cast<volatile std::uint32_t*>(word_) = value; }
  const std::uint32_t* device() const {
    void* pointer = nullptr;
    check(cudaHostGetDevicePointer(&pointer, word_, 0), "mapping of page-locked memory");
    return static_cast<const std::uint32_t*>(pointer);
  }

 private:
  std::uint32_t* word_ = nullptr;
};

}  // namespace aotllm::cuda
