#include "launch.h"

#include <gtest/gtest.h>

#include <string>

#include "aotllm/errors.h"

namespace aotllm::cuda {
namespace {

/// Kind and text of the failure that `status` is.
std::string failure(cudaError_t status) {
  try {
    check(status, "cudaMalloc");
  } catch (const Error& error) {
    return std::string(error_kind_name(error.kind())) + ": " + error.what();
  }
  return "none";
}

TEST(Check, SaysWhatToDoWhereMemoryIsShort) {
  EXPECT_EQ(failure(cudaSuccess), "none");
  EXPECT_EQ(failure(cudaErrorMemoryAllocation),
            "engine_incompatible: CUDA: cudaMalloc: out of memory; free some memory of the device and the host, give "
            "the KV cache less (--kv-cache-memory), or build the engine with --fp8, for more ranks (--tp) or with a "
            "smaller --max-num-tokens");
  EXPECT_EQ(failure(cudaErrorIllegalAddress), "internal: CUDA: cudaMalloc: an illegal memory access was encountered");
}

TEST(Check, ShortMemoryIsNoFailureOfWhatComesNext) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
  void* memory = nullptr;
  EXPECT_THROW(check(cudaMalloc(&memory, std::size_t{1} << 50), "cudaMalloc"), Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace aotllm::cuda
