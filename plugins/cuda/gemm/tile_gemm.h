#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "gemm/gemm.h"

// What the host side of the tile GEMM and its kernels share.
namespace aotllm::cuda {

/// A tile of y per CTA, and the CTAs that work together as a cluster.
struct TileShape {
  int rows;       ///< tokens of a tile
  int columns;    ///< rows of W of a tile
  int cluster_m;  ///< CTAs with neighbouring tokens: they share one tile of W
  int splits;     ///< CTAs that share the sum over k of one tile; only where cluster_m is 1

  constexpr int ctas() const { return cluster_m * splits; }
};

/// All shapes; a tactic's number (`tile.3`) is the index. New ones go to the end: engines name them.
inline constexpr TileShape kTileShapes[] = {
    {128, 256, 2, 1},  // 0: prefill
    {128, 192, 2, 1},  // 1
    {128, 128, 2, 1},  // 2
    {128, 224, 1, 1},  // 3
    {128, 224, 2, 1},  // 4
    {128, 192, 1, 2},  // 5: where whole sums are too few tiles
    {128, 128, 1, 2},  // 6
    {128, 96, 1, 2},   // 7: up to 128 rows
    {128, 64, 1, 2},   // 8
};
inline constexpr int kNumTileShapes = sizeof(kTileShapes) / sizeof(kTileShapes[0]);

/// Arguments of the kernels.
struct TileParams {
  CUtensorMap x_map;         // [max_m, k], boxes of the rows that one CTA loads × 128 bytes
  CUtensorMap w_map;         // [n, k]
  CUtensorMap residual_map;  // [max_m, n], boxes of a tile's rows × 64 columns; where there is a residual
  std::uint64_t x_hint;      // what the L2 does with x and W
  std::uint64_t w_hint;
  const float* w_scales;
  const float* x_scales;
  const float* bias;
  const __nv_bfloat16* residual;
  void* y;
  float softcap;
  Epilogue epilogue;
  Activation activation;
  int m;
  int n;
  int k;
  int m_clusters;    // clusters over the rows of y,
  int n_clusters;    // over its columns
  int group_height;  // m_clusters that are walked for each step along n: what keeps x and W in the L2
};

/// A compiled kernel of one type and shape.
struct TileKernel {
  void (*function)(TileParams) = nullptr;  // null: there is none for this type
  int threads = 0;
  int shared_bytes = 0;
};

// One file for each type, so that they compile apart.
TileKernel bf16_tile_kernel(int tile);
TileKernel fp8_tile_kernel(int tile);
TileKernel fp8_block_tile_kernel(int tile);

}  // namespace aotllm::cuda
