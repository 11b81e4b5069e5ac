#pragma once

#include <cstdint>
#include <vector>

#include "device_array.h"
#include "engine/plan.h"
#include "moe/moe.h"
#include "runner/cuda/weight_store.h"

namespace aotllm::cuda {

/// Normalized rows, as the op's router and its experts read them.
struct MixtureInput {
  const __nv_bfloat16* x = nullptr;
  const std::uint8_t* codes = nullptr;  ///< where experts are FP8, of the same rows
  const float* scales = nullptr;
};

/// The mixtures of experts of a plan, and the scratch that they share in turn.
class Mixtures {
 public:
  /// Throws Error(kInvalidRequest) where the device has too little memory, Error(kEngineIncompatible) for experts that
  /// no kernel takes.
  /// `deterministic`: what becomes of a row does not depend on the rows beside it.
  Mixtures(const Plan& plan, const WeightStore& weights, bool deterministic);

  /// Binds an op to what it reads; returns its index.
  int add(const NormMoeOp& op, const MixtureInput& input);

  /// A step of an op.
  struct Launch {
    int rows = 0;
    const std::int32_t* sequences = nullptr;  ///< [rows], negative = padding
    const __nv_bfloat16* residual = nullptr;  ///< or null
    __nv_bfloat16* out = nullptr;
  };
  /// out = residual + the weighted sums of the rows' experts.
  void launch(int index, const Launch& launch, const Stream& stream) const;

 private:
  using Bf16 = __nv_bfloat16;

  struct Mixture {
    NormMoeOp op;
    MixtureInput input;
    MoeGemm gate_up;
    MoeGemm down;
  };

  Weights weights_of(int linear, int num_experts) const;
  bool is_fp8(const NormMoeOp& op) const;
  int tile_tokens(const NormMoeOp& op, int rows) const;
  MoeRouting routing() const;

  const Plan& plan_;
  const WeightStore& weights_;
  bool deterministic_;
  std::vector<Mixture> mixtures_;

  DeviceArray<float> logits_;          ///< [rows, num_experts]
  DeviceArray<std::int32_t> experts_;  ///< [pairs], as all of a routing
  DeviceArray<float> pair_weights_;
  DeviceArray<std::int32_t> places_;
  DeviceArray<std::int32_t> rows_;
  DeviceArray<float> row_scales_;
  DeviceArray<MoeTile> tiles_;
  DeviceArray<std::uint32_t> members_;
  DeviceArray<std::int32_t> counters_;
  DeviceArray<Bf16> gated_;                ///< [pairs, neurons]
  DeviceArray<std::uint8_t> gated_codes_;  ///< likewise, where experts are FP8
  DeviceArray<float> gated_scales_;        ///< [pairs]
  DeviceArray<Bf16> outputs_;              ///< [pairs, width]
};

}  // namespace aotllm::cuda
