#include "elementwise/random_fill.h"

#include "launch.h"

namespace aotllm::cuda {
namespace {

/// 64 bits of splitmix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014) per element, cut
/// to signs and mantissas below 1 in magnitude.
__global__ void fill_random_kernel(std::uint8_t* data, std::size_t words, bool bf16) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += stride) {
    std::uint64_t x = (i + 1) * 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    const auto bits = static_cast<std::uint32_t>(x ^ (x >> 31));
    // bf16: sign, exponent 120 or 121 (1/128 to 1/32), mantissa. E4M3: sign, exponent 4 to 7 (1/8 to 2), mantissa.
    reinterpret_cast<std::uint32_t*>(data)[i] =
        bf16 ? (bits & 0x80FF80FF) | 0x3C003C00 : (bits & 0x9F9F9F9F) | 0x20202020;
  }
}

}  // namespace

void fill_random(std::uint8_t* data, std::size_t bytes, bool bf16) {
  launch(fill_random_kernel, dim3(1024), dim3(256), 0, Stream{}, data, bytes / 4, bf16);
  check(cudaDeviceSynchronize(), "random values");
}

}  // namespace aotllm::cuda
