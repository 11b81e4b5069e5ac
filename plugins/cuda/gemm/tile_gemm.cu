#include "gemm/tile_gemm.h"

#include <algorithm>
#include <cute/arch/copy_sm90_desc.hpp>
#include <string>

#include "aotllm/errors.h"
#include "ceil_div.h"
#include "tensor_map.h"

namespace aotllm::cuda {
namespace {

TileKernel find_kernel(WeightType type, int tile) {
  switch (type) {
    case WeightType::kBf16:
      return bf16_tile_kernel(tile);
    case WeightType::kFp8:
      return fp8_tile_kernel(tile);
    case WeightType::kFp8Block:
      return fp8_block_tile_kernel(tile);
    default:
      return {};
  }
}

const char* type_name(WeightType type) {
  return type == WeightType::kBf16 ? "bf16" : type == WeightType::kFp8 ? "fp8" : "fp8_block";
}

/// Clusters of the kernel that the device runs at a time.
int resident_clusters(const TileKernel& kernel, int ctas) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(kernel.threads);
  config.dynamicSmemBytes = kernel.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &config), "cudaOccupancyMaxActiveClusters");
  return clusters;
}

class TileGemm final : public Gemm {
 public:
  TileGemm(const GemmProblem& problem, const TileShape& shape, const TileKernel& kernel)
      : problem_(problem), shape_(shape), kernel_(kernel) {
    check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
          "shared memory of a tile GEMM");
    resident_ = resident_clusters(kernel, shape.ctas());
    const Weights& w = problem.w;
    params_.x_map = matrix_tensor_map(problem.x, element_bytes(), problem.max_m, w.k, shape.rows);
    params_.w_map = matrix_tensor_map(w.data, element_bytes(), w.n, w.k, shape.columns / shape.cluster_m);
    if (problem.epilogue == Epilogue::kResidual) {
      params_.residual_map = matrix_tensor_map(problem.residual, 2, problem.max_m, w.n, shape.rows);
    }
    params_.w_scales = w.scales;
    params_.x_scales = problem.x_scales;
    params_.bias = problem.bias;
    params_.residual = problem.residual;
    params_.y = problem.y;
    params_.softcap = problem.softcap;
    params_.epilogue = problem.epilogue;
    params_.activation = problem.activation;
    params_.n = w.n;
    params_.k = w.k;
    params_.n_clusters = ceil_div(w.n, shape.columns);
  }

  void launch(int m, const Stream& stream) const override {
    if (m < 1 || m > problem_.max_m) {
      throw Error(ErrorKind::kInternal,
                  name() + ": got " + std::to_string(m) + " rows, allowed are 1 … " + std::to_string(problem_.max_m));
    }
    TileParams params = params_;
    const int cluster_rows = shape_.rows * shape_.cluster_m;
    params.m = m;
    params.m_clusters = ceil_div(m, cluster_rows);
    params.group_height = std::max(1, kGroupRows / cluster_rows);
    // Weights that are read once make room for others at once; x is read by every CTA, and stays where it fits.
    const std::size_t x_bytes = static_cast<std::size_t>(m) * params.k * element_bytes();
    params.w_hint = hint(params.m_clusters == 1 ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL);
    params.x_hint = hint(x_bytes <= kKeptBytes ? Hint::EVICT_LAST : Hint::EVICT_NORMAL);
    const int tiles = params.m_clusters * params.n_clusters;
    // A CTA that shares its sums takes one tile: they go through the memory into which its next blocks would come.
    const int clusters = shape_.splits > 1 ? tiles : std::min(tiles, resident_);
    cuda::launch(kernel_.function, dim3(clusters * shape_.ctas()), dim3(kernel_.threads), kernel_.shared_bytes, stream,
                 params);
  }

  int max_rows() const override { return problem_.max_m; }

  std::string name() const override {
    return std::string("tile.") + type_name(problem_.w.type) + "." + std::to_string(shape_.rows) + "x" +
           std::to_string(shape_.columns) + ".c" + std::to_string(shape_.cluster_m) + ".s" +
           std::to_string(shape_.splits);
  }

 private:
  using Hint = cute::TMA::CacheHintSm90;

  static std::uint64_t hint(Hint value) { return static_cast<std::uint64_t>(value); }
  int element_bytes() const { return problem_.w.type == WeightType::kBf16 ? 2 : 1; }

  static constexpr std::size_t kKeptBytes = std::size_t{20} << 20;
  static constexpr int kGroupRows = 2048;  // rows of x that a wave of tiles covers while it walks along n

  GemmProblem problem_;
  TileShape shape_;
  TileKernel kernel_;
  int resident_ = 0;
  TileParams params_{};
};

}  // namespace

int num_gemm_tiles() {
  return kNumTileShapes;
}

std::unique_ptr<Gemm> make_tile_gemm(const GemmProblem& problem, int tile, Workspace) {
  const Weights& w = problem.w;
  if (tile < 0 || tile >= kNumTileShapes || problem.max_m < 1) return nullptr;
  if (w.n < 16 || w.n % 16 != 0 || w.k < 16 || w.k % (w.type == WeightType::kBf16 ? 16 : 32) != 0) return nullptr;
  const TileKernel kernel = find_kernel(w.type, tile);
  if (kernel.function == nullptr) return nullptr;
  return std::make_unique<TileGemm>(problem, kTileShapes[tile], kernel);
}

}  // namespace aotllm::cuda
