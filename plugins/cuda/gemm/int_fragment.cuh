#pragma once

#include <cuda_bf16.h>

#include <cstdint>

// Codes → bf16 operands of the tensor cores, exactly. The bits 0x4300 | u are the bf16 number 128 + u for u < 128.
namespace aotllm::cuda {

__device__ inline std::uint32_t int_bits(__nv_bfloat162 pair) {
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ inline __nv_bfloat162 int_pair(std::uint32_t bits) {
  return reinterpret_cast<const __nv_bfloat162&>(bits);
}

/// The two numbers 128 + (code & mask); one instruction, which the compiler would make two of.
template <std::uint32_t kMask>
__device__ inline __nv_bfloat162 int_magic(std::uint32_t codes) {
  std::uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(bits) : "r"(codes), "n"(kMask), "n"(0x43004300));
  return int_pair(bits);
}

/// -(128 + zero) of rows r and r + 8, twice each: makes 128 + u to u − zero. zero ≤ 127.
struct IntZeros {
  __nv_bfloat162 of[2];

  IntZeros() = default;
  __device__ IntZeros(unsigned upper, unsigned lower)
      : of{int_pair((upper | upper << 16) | 0xC300C300u), int_pair((lower | lower << 16) | 0xC300C300u)} {}
};

/// A word of nibbles of one step (`int_place`) → (row r, row r + 8) × (columns c, c + 1), then (c + 8, c + 9).
__device__ inline void int_fragment4(std::uint32_t word, const IntZeros& zeros, std::uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = int_bits(__hadd2(int_magic<0x000F000F>(word >> 4 * i), zeros.of[i % 2]));
}

/// A signed byte is its low 7 bits minus 128 times its sign.
__device__ inline std::uint32_t int_signed_pair(std::uint32_t bytes) {
  return int_bits(__hsub2(int_magic<0x007F007F>(bytes), int_magic<0x00800080>(bytes)));  // the latter is 128 or 256
}

/// Words of rows r and r + 8 of one step → the same order.
__device__ inline void int_fragment8(std::uint32_t upper, std::uint32_t lower, std::uint32_t (&a)[4]) {
  a[0] = int_signed_pair(upper);
  a[1] = int_signed_pair(lower);
  a[2] = int_signed_pair(upper >> 8);
  a[3] = int_signed_pair(lower >> 8);
}

}  // namespace aotllm::cuda
