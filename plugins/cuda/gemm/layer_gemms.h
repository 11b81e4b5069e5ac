#pragma once

#include <cuda_bf16.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device_array.h"
#include "gemm/gemm.h"
#include "gemm/skinny_gemm.h"
#include "group_codes.h"
#include "launch.h"

// The products between two attentions of a decode step of few rows, with nothing between them: attention output +
// residual → gate and up → down + residual → the next layer's Q, K and V, all with FP8 weights.
//
// A product that ends in the residual stream leaves its rows times the weights of the norm that follows, and the sums
// of their squares; the next one multiplies by 1 / rms. What goes from one to the next are E4M3 codes with a float32
// scale for each kCodeGroup values of a row: an epilogue that has a part of a row can make them.
namespace aotllm::cuda {

inline constexpr int kLayerMaxRows = 16;  ///< of a launch

/// One of the linears, and what its rows go on to.
struct LayerLinear {
  Weights w;                                ///< kFp8
  const float* bias = nullptr;              ///< [n] or null
  Epilogue epilogue = Epilogue::kStore;     ///< kStore (the last one), kResidual or kGated
  const __nv_bfloat16* residual = nullptr;  ///< kResidual: [rows, n]
  __nv_bfloat16* y = nullptr;               ///< [rows, n]; not of kGated
  const float* norm = nullptr;              ///< kResidual: [n], weights of the norm before the next linear
  float eps = 0.0f;                         ///< its epsilon
};

/// Linears each of which but the first reads what the one before leaves; the first reads codes of the scratch. n is a
/// multiple of 64, k of 32.
struct LayerProblem {
  std::vector<LayerLinear> linears;
  Activation activation = Activation::kSilu;
};

/// What passes between the linears of a layer, and between attention and the first; layers use it in turn.
class LayerScratch {
 public:
  /// Room for all of `problems`.
  explicit LayerScratch(std::span<const LayerProblem> problems);

  /// What linear `index` reads, of launches of up to `rows_tile` rows: codes [kLayerMaxRows, k].
  GroupCodes input(int index, int rows_tile) const noexcept {
    const auto at = static_cast<std::size_t>(index % 2);
    return {codes_[at].data(), scales_[at].data(), rows_tile};
  }
  float* squares() const noexcept { return squares_.data(); }  ///< [tiles of 64 rows, rows_tile]

 private:
  std::array<DeviceArray<std::uint8_t>, 2> codes_;
  std::array<DeviceArray<float>, 2> scales_;
  DeviceArray<float> squares_;
};

/// The kernels of a problem for up to `rows_tile` (8 or 16) rows.
class LayerGemms {
 public:
  explicit LayerGemms(std::vector<std::unique_ptr<Gemm>> links) : links_(std::move(links)) {}

  /// 1 ≤ m ≤ rows_tile.
  void launch(int m, const Stream& stream) const {
    for (const auto& link : links_) link->launch(m, stream);
  }

 private:
  std::vector<std::unique_ptr<Gemm>> links_;
};

/// Null where the problem is none of these, or the device has no wgmma. `plans` are those of its linears; fewer = the
/// default ones.
std::unique_ptr<LayerGemms> make_layer_gemms(const LayerProblem& problem, int rows_tile, const LayerScratch& scratch,
                                             Workspace workspace, std::span<const SkinnyPlan> plans = {});

}  // namespace aotllm::cuda
