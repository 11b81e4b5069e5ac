#include "gemm/layer_gemms.h"

#include <algorithm>

#include "ceil_div.h"
#include "device_attribute.h"

namespace aotllm::cuda {
namespace {

constexpr int kSquaresRows = 64;    // of W, whose outputs' squares are summed together
constexpr int kWidestStage = 1024;  // columns, at most

bool takes(const LayerProblem& problem) {
  const std::size_t count = problem.linears.size();
  for (std::size_t i = 0; i < count; ++i) {
    const LayerLinear& linear = problem.linears[i];
    const Weights& w = linear.w;
    if (w.type != WeightType::kFp8 || w.n <= 0 || w.n % kSquaresRows != 0 || w.k <= 0 || w.k % kCodeGroup != 0) {
      return false;
    }
    const bool gated = linear.epilogue == Epilogue::kGated;
    if (i + 1 == count) return linear.epilogue == Epilogue::kStore || linear.epilogue == Epilogue::kResidual;
    if (!gated && linear.epilogue != Epilogue::kResidual) return false;
    if (w.n / (gated ? 2 : 1) != problem.linears[i + 1].w.k) return false;
  }
  return false;
}

SkinnyLink link_of(const LayerProblem& problem, int index, int rows_tile, const LayerScratch& scratch) {
  SkinnyLink link;
  const auto at = static_cast<std::size_t>(index);
  if (index > 0 && problem.linears[at - 1].epilogue == Epilogue::kResidual) {
    const LayerLinear& before = problem.linears[at - 1];
    link.normed_tiles = before.w.n / kSquaresRows;
    link.normed_width = static_cast<float>(before.w.n);
    link.eps = before.eps;
    link.squares = scratch.squares();
  }
  if (at + 1 < problem.linears.size()) {
    link.next = scratch.input(index + 1, rows_tile);
    link.next_norm = problem.linears[at].norm;
    link.next_squares = scratch.squares();
  }
  return link;
}

}  // namespace

LayerScratch::LayerScratch(std::span<const LayerProblem> problems) {
  std::size_t widths[2] = {};
  std::size_t tiles = 0;
  for (const LayerProblem& problem : problems) {
    for (std::size_t i = 0; i < problem.linears.size(); ++i) {
      const Weights& w = problem.linears[i].w;
      const auto stages = static_cast<std::size_t>(ceil_div(w.k, kWidestStage));  // loads of scales are whole stages
      widths[i % 2] = std::max(widths[i % 2], stages * kWidestStage);
      tiles = std::max(tiles, static_cast<std::size_t>(w.n / kSquaresRows));
    }
  }
  for (std::size_t i = 0; i < 2; ++i) {
    codes_[i] = DeviceArray<std::uint8_t>(kLayerMaxRows * widths[i]);
    scales_[i] = DeviceArray<float>(kLayerMaxRows * widths[i] / kCodeGroup);
    codes_[i].fill(0);  // tiles reach beyond the rows of a step, and stages beyond the last column
    scales_[i].fill(0);
  }
  squares_ = DeviceArray<float>(kLayerMaxRows * tiles);
  squares_.fill(0);
}

std::unique_ptr<LayerGemms> make_layer_gemms(const LayerProblem& problem, int rows_tile, const LayerScratch& scratch,
                                             Workspace workspace, std::span<const SkinnyPlan> plans) {
  if (!takes(problem) || (rows_tile != 8 && rows_tile != 16)) return nullptr;
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  std::vector<std::unique_ptr<Gemm>> links;
  for (std::size_t i = 0; i < problem.linears.size(); ++i) {
    const LayerLinear& linear = problem.linears[i];
    const Weights& w = linear.w;
    const GroupCodes input = scratch.input(static_cast<int>(i), rows_tile);
    GemmProblem product;
    product.w = w;
    product.x = input.codes;
    product.x_scales = input.scales;
    product.max_m = kLayerMaxRows;
    product.bias = linear.bias;
    product.epilogue = linear.epilogue;
    product.activation = problem.activation;
    product.residual = linear.residual;
    product.y = linear.y;
    const SkinnyPlan plan =
        i < plans.size() ? plans[i] : default_skinny_plan(w.type, w.n, w.k, rows_tile, multiprocessors);
    const SkinnyLink link = link_of(problem, static_cast<int>(i), rows_tile, scratch);
    links.push_back(make_skinny_link(product, link, rows_tile, workspace, plan));
    if (links.back() == nullptr) return nullptr;
  }
  return std::make_unique<LayerGemms>(std::move(links));
}

}  // namespace aotllm::cuda
