#include "moe/moe_gemm.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "aotllm/errors.h"
#include "device_attribute.h"
#include "tensor_map.h"

namespace aotllm::cuda {
namespace {

constexpr int kTileTokens[] = {8, 16, 32, 64, 128, 160, 192, 320, 384};

/// Time for a place of a tile, whether it holds a row or not, in that of tiles of 128; 0 = there is no kernel. Measured
/// on an H200 at the shapes of Mixtral 8x7B and Qwen3-30B-A3B.
struct LargeTile {
  int tokens;
  float bf16;
  float fp8;
  float integers;

  float time(WeightType type) const {
    return type == WeightType::kBf16 ? bf16 : type == WeightType::kFp8 ? fp8 : integers;
  }
};
constexpr LargeTile kLargeTiles[] = {{64, 0.0f, 0.0f, 1.7f},    {128, 1.0f, 1.0f, 1.0f},  {160, 0.88f, 1.03f, 0.0f},
                                     {192, 0.875f, 0.0f, 0.0f}, {320, 0.83f, 0.0f, 0.0f}, {384, 0.81f, 0.0f, 0.0f}};

/// Tiles of an expert in the mean over what its number of rows may be.
float expected_tiles(float count, float deviation, int tokens) {
  float sum = 0.0f;
  for (const float away : {-1.5f, -0.75f, 0.0f, 0.75f, 1.5f}) {
    sum += std::ceil(std::max(count + away * deviation, 1.0f) / static_cast<float>(tokens));
  }
  return sum / 5.0f;
}

MoeGemmKernel find_kernel(const Weights& w, int tokens) {
  if (w.type == WeightType::kBf16) return moe_gemm_bf16(tokens);
  if (w.type == WeightType::kFp8) return moe_gemm_fp8(tokens);
  IntShape shape;
  if (!int_shape(w, shape)) return {};
  switch (shape.format) {
    case IntFormat::kInt4Group128:
      return moe_gemm_int4_group128(tokens);
    case IntFormat::kInt4Group32:
      return moe_gemm_int4_group32(tokens);
    case IntFormat::kInt8Row:
      return moe_gemm_int8_row(tokens);
    case IntFormat::kInt8Group32:
      return moe_gemm_int8_group32(tokens);
  }
  return {};
}

/// CTAs of the kernel that the device runs at a time.
int resident_ctas(const MoeGemmKernel& kernel) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(kernel.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(kernel.cluster));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(kernel.shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &config), "cudaOccupancyMaxActiveClusters");
  return std::max(clusters, 1) * kernel.cluster;
}

/// wgmma exists on SM 9.0 only.
void check_device() {
  const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
  if (major == 9) return;
  throw Error(ErrorKind::kEngineIncompatible,
              "mixtures of experts need a GPU of SM 9.0, this one has SM " + std::to_string(major) + ".x");
}

void check_problem(const MoeGemmProblem& problem) {
  const auto fail = [](const std::string& text) { throw Error(ErrorKind::kInternal, "MoeGemm: " + text); };
  const Weights& w = problem.w;
  IntShape shape;
  if (w.type != WeightType::kBf16 && w.type != WeightType::kFp8 && !int_shape(w, shape)) {
    fail("takes weights in bf16, FP8 with row scales, and integers with scales, in groups with zeros");
  }
  const int rows = has_integers(w.type) ? kIntRows : 16;
  const int columns = w.type == WeightType::kBf16 ? 8 : 16;
  if (w.n < rows || w.n % rows != 0 || w.k < columns || w.k % columns != 0) {
    fail("got experts of " + std::to_string(w.n) + " × " + std::to_string(w.k) + ", n must be a multiple of " +
         std::to_string(rows) + ", k of " + std::to_string(columns));
  }
  if (problem.num_experts < 1 || problem.num_experts > kMoeMaxExperts) {
    fail("got " + std::to_string(problem.num_experts) + " experts, allowed are 1 to " + std::to_string(kMoeMaxExperts));
  }
  if (problem.epilogue != Epilogue::kStore && problem.epilogue != Epilogue::kGated) fail("an epilogue without experts");
}

}  // namespace

int moe_tile_tokens(int m, int num_experts, int top_k, WeightType type) {
  const float share = static_cast<float>(top_k) / static_cast<float>(num_experts);
  const float count = static_cast<float>(m) * share;  // of an expert's rows, where they are spread evenly
  const float deviation = std::sqrt(count * (1.0f - share));
  for (const int tokens : kTileTokens) {  // weights are what takes time
    if (tokens <= 64 && static_cast<float>(tokens) >= count + 2.0f * deviation) return tokens;
  }
  int best = 0;
  float least = 0.0f;
  for (const LargeTile& tile : kLargeTiles) {
    const float each = tile.time(type);
    const float time = each * static_cast<float>(tile.tokens) * expected_tiles(count, deviation, tile.tokens);
    if (each > 0.0f && (best == 0 || time < least)) best = tile.tokens, least = time;
  }
  return best;
}

MoeGemm::MoeGemm(const MoeGemmProblem& problem) : problem_(problem) {
  check_problem(problem);
  check_device();
  const Weights& w = problem.w;
  if (!has_integers(w.type)) {
    w_map_ = matrix_tensor_map(w.data, w.type == WeightType::kBf16 ? 2 : 1,
                               static_cast<std::uint64_t>(problem.num_experts) * static_cast<std::uint64_t>(w.n),
                               static_cast<std::uint64_t>(w.k), kMoeBoxRows);
  }
  for (const int tokens : kTileTokens) {
    const MoeGemmKernel kernel = find_kernel(w, tokens);
    if (kernel.function == nullptr) continue;
    check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
          "shared memory of an experts' GEMM");
  }
}

void MoeGemm::launch(const MoeRouting& routing, int pairs, int tokens, const Stream& stream) const {
  if (pairs <= 0) return;
  const Weights& w = problem_.w;
  const MoeGemmKernel kernel = find_kernel(w, tokens);
  if (kernel.function == nullptr) {
    throw Error(ErrorKind::kInternal,
                "MoeGemm: got tiles of " + std::to_string(tokens) +
                    " tokens, allowed are 8, 16, 32, 64, 128, but for integers 160 and, for bf16, 192, 320 and 384");
  }
  MoeGemmArgs args;
  args.x = problem_.x;
  args.rows = problem_.gathers ? routing.rows : nullptr;
  args.x_scales = problem_.x_scales;
  args.w_scales = w.scales;
  if (IntShape shape; int_shape(w, shape)) args.blocks = IntBlocks(w, shape);
  args.y = problem_.y;
  args.tiles = routing.tiles;
  args.num_tiles = routing.counters;
  args.n = w.n;
  args.k = w.k;
  args.is_gated = problem_.epilogue == Epilogue::kGated;
  args.tiles_known = problem_.tiles_known;
  args.activation = problem_.activation;
  const int most =
      moe_max_tiles(pairs, problem_.num_experts, 1, tokens) * ((w.n + kernel.rows - 1) / kernel.rows) * kernel.cluster;
  const int ctas = std::min(most, resident_ctas(kernel));
  cuda::launch(kernel.function, dim3(static_cast<unsigned>(ctas)), dim3(static_cast<unsigned>(kernel.threads)),
               static_cast<std::size_t>(kernel.shared_bytes), stream, w_map_, args);
}

}  // namespace aotllm::cuda
