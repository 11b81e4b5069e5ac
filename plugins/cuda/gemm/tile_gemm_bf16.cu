#include "gemm/tile_gemm_kernel.cuh"

namespace aotllm::cuda {
namespace {

template <int... kTiles>
TileKernel select(int tile, std::integer_sequence<int, kTiles...>) {
  static const TileKernel kernels[] = {tile::tile_kernel<tile::Config<WeightType::kBf16, kTiles>>()...};
  return kernels[tile];
}

}  // namespace

TileKernel bf16_tile_kernel(int tile) {
  return select(tile, std::make_integer_sequence<int, kNumTileShapes>{});
}

}  // namespace aotllm::cuda
