#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <string>

// The part of NCCL's C interface that ranks use, declared here so that neither its header nor the library itself is
// needed to build; values as in nccl.h of NCCL 2.
namespace aotllm::cuda {

namespace nccl {

using Comm = struct CommTag*;
using Result = int;

inline constexpr Result kSuccess = 0;
inline constexpr int kUint8 = 1;  // ncclDataType_t

/// Entry points, by the names of the C interface.
struct Functions {
  Result (*comm_init_all)(Comm*, int count, const int* devices) = nullptr;
  Result (*comm_destroy)(Comm) = nullptr;
  Result (*comm_abort)(Comm) = nullptr;
  Result (*send)(const void*, std::size_t count, int type, int peer, Comm, cudaStream_t) = nullptr;
  Result (*recv)(void*, std::size_t count, int type, int peer, Comm, cudaStream_t) = nullptr;
  Result (*all_gather)(const void*, void*, std::size_t count_of_one, int type, Comm, cudaStream_t) = nullptr;
  Result (*group_start)() = nullptr;
  Result (*group_end)() = nullptr;
  const char* (*get_error_string)(Result) = nullptr;
};

}  // namespace nccl

/// A loaded libnccl.
class NcclLibrary {
 public:
  /// From `path`, or libnccl.so.2 where the dynamic linker looks. Throws Error(kEngineIncompatible) where it cannot be
  /// loaded or lacks a function.
  explicit NcclLibrary(const std::string& path);

  const nccl::Functions& functions() const noexcept { return functions_; }
  /// Throws Error(kInternal) naming `what` where `result` is a failure.
  void check(nccl::Result result, const char* what) const;

 private:
  std::shared_ptr<void> library_;
  nccl::Functions functions_;
};

}  // namespace aotllm::cuda
