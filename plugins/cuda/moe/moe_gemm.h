#pragma once

#include "gemm/int_layout.h"
#include "moe/moe.h"

// What the host side of the experts' GEMMs and their kernels share.
namespace aotllm::cuda {

/// Arguments besides the map of W. Shapes as in MoeGemmProblem.
struct MoeGemmArgs {
  const void* x = nullptr;
  const std::int32_t* rows = nullptr;  ///< of places; null = place p is row p
  const float* x_scales = nullptr;
  const float* w_scales = nullptr;  ///< [num_experts, n]
  IntBlocks blocks;                 ///< of integers, one expert's shape
  __nv_bfloat16* y = nullptr;
  const MoeTile* tiles = nullptr;
  const std::int32_t* num_tiles = nullptr;
  int n = 0;
  int k = 0;
  bool is_gated = false;
  bool tiles_known = false;
  Activation activation = Activation::kSilu;
};

struct MoeGemmKernel {
  void (*function)(CUtensorMap w, MoeGemmArgs args) = nullptr;  ///< null: no such kernel
  int threads = 0;
  int shared_bytes = 0;
  int rows = 0;     ///< of W, of a tile
  int cluster = 1;  ///< CTAs that share a tile
};

/// Rows of a box of W's map.
inline constexpr int kMoeBoxRows = 64;

// One file for each type, so that they compile apart. `tokens`: 8, 16, 32, 64, 128, 160, and for bf16 192 and, by
// clusters of two CTAs, 320 and 384.
MoeGemmKernel moe_gemm_bf16(int tokens);
MoeGemmKernel moe_gemm_fp8(int tokens);
// `tokens`: 8, 16, 32, 64, 128.
MoeGemmKernel moe_gemm_int4_group128(int tokens);
MoeGemmKernel moe_gemm_int4_group32(int tokens);
MoeGemmKernel moe_gemm_int8_row(int tokens);
MoeGemmKernel moe_gemm_int8_group32(int tokens);

}  // namespace aotllm::cuda
