#include "elementwise/mapped_copy.h"

#include <cstdint>

#include "launch.h"

namespace aotllm::cuda {
namespace {

constexpr std::size_t kMostBytes = 64 << 10;  // more, as large prompts are, is the copy engine's
constexpr unsigned kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    copy_mapped_kernel(std::uint8_t* to, const std::uint8_t* from, unsigned bytes) {
  const unsigned at = 16 * (blockIdx.x * kThreads + threadIdx.x);
  if (at + 16 <= bytes) {
    *reinterpret_cast<uint4*>(to + at) = __ldcv(reinterpret_cast<const uint4*>(from + at));
    return;
  }
  for (unsigned word = at; word < bytes; word += 4) {
    *reinterpret_cast<std::uint32_t*>(to + word) = __ldcv(reinterpret_cast<const std::uint32_t*>(from + word));
  }
}

}  // namespace

void copy_mapped(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return;
  if (bytes > kMostBytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copy between host and device");
    return;
  }
  const std::size_t blocks = (bytes + 16 * kThreads - 1) / (16 * kThreads);
  launch(copy_mapped_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, Stream{stream},
         static_cast<std::uint8_t*>(to), static_cast<const std::uint8_t*>(from), static_cast<unsigned>(bytes));
}

}  // namespace aotllm::cuda
