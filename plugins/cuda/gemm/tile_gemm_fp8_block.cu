#include "gemm/tile_gemm_kernel.cuh"

namespace aotllm::cuda {
namespace {

// Blocks of scales are 128 rows of W high, and two sets of accumulators must fit in registers.
template <int kTile>
TileKernel kernel() {
  if constexpr (kTileShapes[kTile].columns == 128) {
    return tile::tile_kernel<tile::Config<WeightType::kFp8Block, kTile>>();
  } else {
    return {};
  }
}

template <int... kTiles>
TileKernel select(int tile, std::integer_sequence<int, kTiles...>) {
  static const TileKernel kernels[] = {kernel<kTiles>()...};
  return kernels[tile];
}

}  // namespace

TileKernel fp8_block_tile_kernel(int tile) {
  return select(tile, std::make_integer_sequence<int, kNumTileShapes>{});
}

}  // namespace aotllm::cuda
