#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "launch.h"

namespace aotllm::cuda {

/// Device memory of `size` elements, freed with its owner.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t size) : size_(size) {
    if (size > 0) check(cudaMalloc(&data_, size * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(std::span<const T> values) : DeviceArray(values.size()) { upload(values); }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(std::span<const T>(values)) {}
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept { return size_ * sizeof(T); }

  /// Sets every byte; 0xFF makes NaN of every float type. Done when it returns, as is upload: streams that do not wait
  /// for the default one see it.
  void fill(int byte) {
    check(cudaMemset(data_, byte, bytes()), "cudaMemset");
    check(cudaStreamSynchronize(nullptr), "cudaMemset");
  }
  void upload(std::span<const T> values) {
    check(cudaMemcpy(data_, values.data(), values.size_bytes(), cudaMemcpyHostToDevice), "copy to the device");
    check(cudaStreamSynchronize(nullptr), "copy to the device");
  }
  /// Waits for all work of the device.
  std::vector<T> download() const {
    std::vector<T> values(size_);
    check(cudaDeviceSynchronize(), "kernel");
    check(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), "copy from the device");
    return values;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace aotllm::cuda
