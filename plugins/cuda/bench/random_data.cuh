#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "device_array.h"

// Random values made on the device: never measure on zeros.
namespace aotllm::cuda {

__device__ inline float random_value(std::uint64_t i) {  // about normal, from a hash of the index
  std::uint64_t x = i * 0x9E3779B97F4A7C15ull + 0x243F6A8885A308D3ull;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 32;
  float sum = 0.0f;
  for (int part = 0; part < 4; ++part) sum += static_cast<float>(x >> 16 * part & 0xFFFF) / 65536.0f - 0.5f;
  return sum * 1.73f;
}

inline __device__ void store_random(__nv_bfloat16* to, float value) {
  *to = __float2bfloat16_rn(value);
}
inline __device__ void store_random(float* to, float value) {
  *to = value;
}
inline __device__ void store_random(std::uint8_t* to, float value) {
  *to = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

template <class T>
__global__ void random_kernel(T* values, std::uint64_t count, float sigma) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    store_random(values + i, sigma * random_value(i));
  }
}

/// bf16, float32 or (for bytes) E4M3 values of deviation `sigma`.
template <class T>
void fill_random(T* values, std::size_t count, float sigma) {
  random_kernel<<<2048, 256>>>(values, count, sigma);
  check(cudaDeviceSynchronize(), "random values");
}

}  // namespace aotllm::cuda
