#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <span>
#include <utility>

#include "launch.h"

// Owners of CUDA's handles and of page-locked memory.
namespace aotllm::cuda {

/// Page-locked host memory, which the device can also read and write in place (`device()`).
template <class T>
class PinnedArray {
 public:
  PinnedArray() = default;
  explicit PinnedArray(std::size_t size) : size_(size) {
    if (size == 0) return;
    check(cudaHostAlloc(&data_, size * sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable), "page-locked memory");
  }
  PinnedArray(PinnedArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  PinnedArray& operator=(PinnedArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~PinnedArray() {
    if (data_ != nullptr) cudaFreeHost(data_);
  }

  T* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  std::span<T> span() const noexcept { return {data_, size_}; }
  T* device() const {
    void* pointer = nullptr;
    check(cudaHostGetDevicePointer(&pointer, data_, 0), "mapping of page-locked memory");
    return static_cast<T*>(pointer);
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

class OwnedStream {
 public:
  OwnedStream() { check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "stream"); }
  OwnedStream(OwnedStream&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  OwnedStream& operator=(OwnedStream&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~OwnedStream() {
    if (handle_ != nullptr) cudaStreamDestroy(handle_);
  }
  cudaStream_t handle() const noexcept { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

class OwnedEvent {
 public:
  OwnedEvent() { check(cudaEventCreateWithFlags(&handle_, cudaEventDisableTiming), "event"); }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;
  ~OwnedEvent() { cudaEventDestroy(handle_); }
  cudaEvent_t handle() const noexcept { return handle_; }

 private:
  cudaEvent_t handle_ = nullptr;
};

/// An instantiated CUDA graph.
class OwnedGraph {
 public:
  OwnedGraph() = default;
  /// Takes over `graph`, which it destroys in any case.
  explicit OwnedGraph(cudaGraph_t graph) {
    const cudaError_t status = cudaGraphInstantiate(&handle_, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "instantiation of a graph");
  }
  OwnedGraph(OwnedGraph&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  OwnedGraph& operator=(OwnedGraph&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~OwnedGraph() {
    if (handle_ != nullptr) cudaGraphExecDestroy(handle_);
  }
  explicit operator bool() const noexcept { return handle_ != nullptr; }
  /// Does what the first launch would have to do first.
  void upload(cudaStream_t stream) const { check(cudaGraphUpload(handle_, stream), "upload of a graph"); }
  void launch(cudaStream_t stream) const { check(cudaGraphLaunch(handle_, stream), "launch of a graph"); }

 private:
  cudaGraphExec_t handle_ = nullptr;
};

}  // namespace aotllm::cuda
