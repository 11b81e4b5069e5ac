#pragma once

#include <cstdint>

#include "gemm/gemm.h"

// What the host side of the GEMM for SM80 and its kernels share.
namespace aotllm::cuda::sm80 {

/// A tile of yᵀ = W · xᵀ per CTA.
struct TileShape {
  int rows;    ///< of W
  int tokens;  ///< rows of x
  int stages;  ///< of the ring, each 128 bytes along k; in all at most the 99 KB that a CTA has on SM86 and SM89
  int warps_along_rows;
  int warps_along_tokens;
  bool splits;  ///< whether several CTAs may share the sum over k of a tile, where tiles are few

  constexpr int threads() const { return 32 * warps_along_rows * warps_along_tokens; }
  constexpr int sums_pitch() const { return rows + 4; }
  constexpr int shared_bytes() const {
    const int ring = stages * (rows + tokens) * 128;
    const int sums = tokens * sums_pitch() * 4;
    return ring > sums ? ring : sums;
  }
};

/// All shapes; a tactic's number (`sm80.3`) is the index. New ones go to the end: engines name them.
inline constexpr TileShape kTileShapes[] = {
    {128, 128, 3, 2, 4, false},  // 0: prefill; its sums have one order whatever the number of rows
    {128, 128, 3, 2, 4, true},   // 1
    {128, 64, 3, 4, 2, true},    // 2
    {64, 32, 4, 4, 1, true},     // 3: decode
    {64, 16, 6, 4, 1, true},     // 4
    {64, 8, 6, 4, 1, true},      // 5
};
inline constexpr int kNumTileShapes = sizeof(kTileShapes) / sizeof(kTileShapes[0]);

/// What a launch adds to its problem.
struct LaunchArgs {
  int m = 0;
  int row_tiles = 0;
  int token_tiles = 0;
  int splits = 1;
  int steps_per_split = 0;       ///< of 128 bytes along k
  float* partials = nullptr;     ///< [tiles][splits][tokens][rows]
  unsigned* counters = nullptr;  ///< [tiles], arrived shares; zero between launches
};

using Kernel = void (*)(GemmProblem problem, LaunchArgs args);
Kernel bf16_kernel(int shape);
Kernel fp8_kernel(int shape);

}  // namespace aotllm::cuda::sm80
