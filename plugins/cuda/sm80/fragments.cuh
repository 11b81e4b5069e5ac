#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/mma_sm89.hpp>

#include <cstdint>

// What the kernels for SM80 and later are made of: asynchronous copies of 16 bytes, and products of fragments that
// ldmatrix reads from shared memory. Nothing here needs more than SM80 but products of E4M3, which need SM89.
//
// A fragment is the same in bytes for both types: an operand [16, 32 bytes] · [8, 32 bytes]ᵀ is m16n8k16 of bf16 and
// m16n8k32 of E4M3. Of a product's result [16, 8] a lane holds rows lane / 4 and that + 8, columns 2 (lane % 4) and the
// next: r[0], r[1] of the first row, r[2], r[3] of the second.
namespace aotllm::cuda::sm80 {

struct Bf16Type {
  static constexpr int kBytes = 2;
};
struct Fp8Type {
  static constexpr int kBytes = 1;
};

/// 16 bytes to shared memory, zeros where `exists` is false; `from` must be an address even then.
__device__ inline void copy16(void* to, const void* from, bool exists) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(*static_cast<const uint4*>(from), *static_cast<uint4*>(to),
                                                     exists);
}

/// The address of lane's row of an operand of 16 rows: lanes 0 … 15 take the rows' first 16 bytes, 16 … 31 the next.
__device__ inline int row_of_lane() {
  return static_cast<int>(threadIdx.x) % 16;
}
__device__ inline int half_of_lane() {
  return static_cast<int>(threadIdx.x) / 16 % 2;
}

using Operand = std::uint32_t[4];

__device__ inline void load_operand(Operand& r, const void* address) {
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(address), r[0], r[1], r[2], r[3]);
}
/// Of 8 rows: addresses of lanes 0 … 7 and 8 … 15 are those of the first and the second 16 bytes.
__device__ inline void load_half_operand(std::uint32_t& r0, std::uint32_t& r1, const void* address) {
  cute::SM75_U32x2_LDSM_N::copy(*static_cast<const cute::uint128_t*>(address), r0, r1);
}
/// Of pairs of bytes, transposed.
__device__ inline void load_transposed(Operand& r, const void* address) {
  cute::SM75_U16x8_LDSM_T::copy(*static_cast<const cute::uint128_t*>(address), r[0], r[1], r[2], r[3]);
}

template <class Type>
__device__ inline void multiply_add(float (&c)[4], const Operand& a, std::uint32_t b0, std::uint32_t b1) {
  if constexpr (Type::kBytes == 2) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                              c[3]);
  } else {
    cute::SM89_16x8x32_F32E4M3E4M3F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                              c[3]);
  }
}

}  // namespace aotllm::cuda::sm80
