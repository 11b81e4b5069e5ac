#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

// Eight neighbouring values: what a thread of the elementwise kernels loads and stores at once.
namespace aotllm::cuda {

/// Activations are read past the L1 (.cg): with programmatic launch a predecessor on another multiprocessor may have
/// written them after this one's L1 was invalidated. Weights go through __ldg.
__device__ inline uint4 load_activation(const __nv_bfloat16* address) {
  return __ldcg(reinterpret_cast<const uint4*>(address));
}

__device__ inline float2 unpack_bf16x2(std::uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
}

__device__ inline void unpack(const uint4& packed, float (&values)[8]) {
  const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_bf16x2(words[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ inline std::uint32_t pack_bf16x2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.y)) << 16 | __bfloat16_as_ushort(pair.x);
}

__device__ inline uint4 pack_bf16(const float (&values)[8]) {
  return {pack_bf16x2(values[0], values[1]), pack_bf16x2(values[2], values[3]), pack_bf16x2(values[4], values[5]),
          pack_bf16x2(values[6], values[7])};
}

/// E4M3 codes, to nearest even, saturating at ±448; NaN stays NaN.
__device__ inline uint2 pack_fp8(const float (&values)[8]) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = __nv_cvt_float2_to_fp8x2({values[2 * i], values[2 * i + 1]}, __NV_SATFINITE, __NV_E4M3);
  }
  return {words[0] | words[1] << 16, words[2] | words[3] << 16};
}

/// Eight float32 weights or biases, 16-byte aligned.
__device__ inline void load_weights(const float* address, float (&values)[8]) {
  const float4 low = __ldg(reinterpret_cast<const float4*>(address));
  const float4 high = __ldg(reinterpret_cast<const float4*>(address) + 1);
  values[0] = low.x;
  values[1] = low.y;
  values[2] = low.z;
  values[3] = low.w;
  values[4] = high.x;
  values[5] = high.y;
  values[6] = high.z;
  values[7] = high.w;
}

}  // namespace aotllm::cuda
