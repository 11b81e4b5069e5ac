#pragma once

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>

#include <cstdint>
#include <utility>

// The tensor cores' instruction for 64 rows of x, N rows of W and 32 bytes along k, both operands in shared memory.
namespace aotllm::cuda::tile {

template <bool kFp8, int N>
struct MmaOp;

#define AOTLLM_TILE_MMA(N)                                                                                        \
  template <>                                                                                                     \
  struct MmaOp<false, N> {                                                                                        \
    using Type =                                                                                                  \
        cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>; \
  };                                                                                                              \
  template <>                                                                                                     \
  struct MmaOp<true, N> {                                                                                         \
    using Type = cute::SM90::GMMA::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<>;                                           \
  };
AOTLLM_TILE_MMA(64)
AOTLLM_TILE_MMA(96)
AOTLLM_TILE_MMA(128)
AOTLLM_TILE_MMA(192)
AOTLLM_TILE_MMA(224)
AOTLLM_TILE_MMA(256)
#undef AOTLLM_TILE_MMA

template <class Op, std::size_t... I>
__device__ __forceinline__ void mma_unpacked(std::uint64_t a, std::uint64_t b, float (&d)[sizeof...(I)],
                                             cute::SM90::GMMA::ScaleOut scale, std::index_sequence<I...>) {
  Op::fma(a, b, d[I]..., scale);
}

/// d [64, N] += a [64, 32 bytes] · b [N, 32 bytes]ᵀ. d[4 g + i] of a thread: column 8 g + 2 (lane % 4) + i % 2, row
/// 16 warp + lane / 4 + 8 (i / 2). With kFresh d is set, not added to.
template <bool kFp8, int N, bool kFresh>
__device__ __forceinline__ void mma(std::uint64_t a, std::uint64_t b, float (&d)[N / 2]) {
  constexpr auto kScale = kFresh ? cute::SM90::GMMA::ScaleOut::Zero : cute::SM90::GMMA::ScaleOut::One;
  mma_unpacked<typename MmaOp<kFp8, N>::Type>(a, b, d, kScale, std::make_index_sequence<N / 2>{});
}

template <int N>
__device__ __forceinline__ void fence_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) cute::warpgroup_fence_operand(d[i]);
}

/// Describes rows of 128 bytes in the 128-byte swizzle (8 rows are 1024 bytes, at a multiple of 1024). Adding bytes /
/// 16 moves it: along k within the 128 bytes, or by whole groups of 8 rows.
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t shared_address) {
  cute::GmmaDescriptor result;
  result.bitfield.start_address_ = static_cast<std::uint16_t>(shared_address >> 4);
  result.bitfield.leading_byte_offset_ = 1;  // unused in this swizzle
  result.bitfield.stride_byte_offset_ = 1024 >> 4;
  result.bitfield.base_offset_ = 0;
  result.bitfield.layout_type_ = static_cast<std::uint8_t>(cute::SM90::GMMA::LayoutType::B128);
  return result.desc_;
}

}  // namespace aotllm::cuda::tile
