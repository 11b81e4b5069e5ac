#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "comm/communicator.h"
#include "device_array.h"
#include "elementwise/elementwise.h"
#include "engine/plan.h"
#include "gemm/gemm.h"
#include "runner/cuda/kv_memory.h"
#include "runner/cuda/layer_chains.h"
#include "runner/cuda/linear_kernels.h"
#include "runner/cuda/mixtures.h"
#include "runner/cuda/step_data.h"
#include "runner/cuda/weight_store.h"

namespace aotllm::cuda {

/// The most rows that the head computes at a time, at least.
inline constexpr int kMinHeadRows = 64;
int head_rows(const Plan& plan);

/// What the ranks of a plan exchange.
CommunicatorLimits communicator_limits(const Plan& plan);

struct ProgramOptions {
  bool deterministic = false;
  std::string cublaslt;
  std::string tactics;  ///< text of tactics.json, or empty
};

/// A plan bound to memory: every kernel of every op with its operands, so that running a step is launching kernels.
class Program {
 public:
  /// Reserves the arena and all scratch. Throws Error(kInvalidRequest) where the device has too little memory,
  /// Error(kEngineIncompatible) for a linear that no kernel takes. `ranks`, which must live as long, joins this rank to
  /// the others; null where the plan has one rank.
  Program(const Plan& plan, const WeightStore& weights, const ProgramOptions& options, Communicator* ranks = nullptr);

  void bind_kv(const KvBlocks& kv);

  /// Launches the layers for a step of `shape`. `fed` (device address): what the step before has sampled, which tokens
  /// of this one may stand for.
  void run_layers(const StepShape& shape, const StepView& step, const std::int32_t* fed, const Stream& stream) const;
  /// After them, on the last stage: the head of the rows that are sampled and, on rank 0 of it and unless they are
  /// sampled late, sampling: tokens to `sampled_tokens` [shape.sampled] (device address).
  void run_head(const StepShape& shape, const StepView& step, std::int32_t* sampled_tokens, const Stream& stream) const;

  /// Launches the head for `count` ≤ head_rows() rows; logits() of rank 0 holds them then.
  void head(const std::int32_t* rows, int count, const Stream& stream) const;
  /// Only the final norm of rows: hidden() holds them then.
  void final_norm(const std::int32_t* rows, int count, const Stream& stream) const;

  /// The residual stream [rows, hidden_size] as it comes from the stage before, and as it goes on to the next one; null
  /// at the ends of the pipeline.
  void* entering() const { return plan_.entering < 0 ? nullptr : buffer(plan_.entering); }
  const void* leaving() const { return plan_.leaving < 0 ? nullptr : buffer(plan_.leaving); }
  std::size_t stream_bytes(int rows) const noexcept {
    return sizeof(Bf16) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(plan_.hidden_size);
  }

  int head_rows() const noexcept { return head_rows_; }
  /// [head_rows, vocab_size]; null on ranks other than 0.
  float* logits() const noexcept { return ranks_ != nullptr ? ranks_->gathered() : logits_.data(); }
  /// What sampling on the device takes for head_rows() rows; what was there is not kept.
  std::span<std::uint8_t> sampling_workspace() const noexcept {
    return {sampling_workspace_.data(), sampling_workspace_.size()};
  }
  const __nv_bfloat16* hidden() const noexcept { return head_input_.data(); }  ///< [head_rows, hidden_size]

 private:
  using Bf16 = __nv_bfloat16;

  /// An op, and the index of its linear's kernels, or of its mixture.
  struct BoundOp {
    Op op;
    int kernels = -1;
  };
  /// A step as ops see it.
  struct Run {
    const StepShape& shape;
    const StepView& step;
    const std::int32_t* fed;  ///< what the step before has sampled
    const Stream& stream;
    const RmsNormArgs* next_norm = nullptr;  ///< of the next op, which a sum over ranks takes along; null = none does
    bool is_normed = false;                  ///< the op before has done so
    const NormQkvRopeOp* fused_rope = nullptr;  ///< its rotation is left to attention
    GroupCodes codes = {};                      ///< where attention leaves its rows, in place of its output; none
  };

  void reserve_scratch();
  int bind(const Op& op);
  GemmProblem problem(int linear, const void* bf16_input) const;
  Bf16* buffer(int index) const;
  bool sums_ranks(const LinearResidualOp& op) const noexcept { return op.all_reduce && ranks_ != nullptr; }
  KvLayerView kv_view(int layer, const Run& run) const;

  void launch(const EmbeddingOp& op, int kernels, const Run& run) const;
  void launch(const NormQkvRopeOp& op, int kernels, const Run& run) const;
  void launch(const PagedAttentionOp& op, int kernels, const Run& run) const;
  void launch(const LinearResidualOp& op, int kernels, const Run& run) const;
  void launch(const NormSwigluOp& op, int kernels, const Run& run) const;
  void launch(const NormMoeOp& op, int kernels, const Run& run) const;
  void launch(const LmHeadOp& op, int kernels, const Run& run) const;
  void rotate(const NormQkvRopeOp& op, const Run& run) const;
  void norm(const Bf16* x, std::span<const float> weight, float eps, int linear, const Run& run) const;
  RmsNormArgs norm_args(const Bf16* x, std::span<const float> weight, float eps, int linear, int rows) const;
  RopeKvArgs rope_args(const NormQkvRopeOp& op) const;
  const NormQkvRopeOp* rope_of_attention(std::size_t op, const StepShape& shape) const;
  std::optional<RmsNormArgs> fused_norm(std::size_t op, int rows) const;

  const Plan& plan_;
  const WeightStore& weights_;
  Communicator* const ranks_;  ///< null = this is the only one
  const bool deterministic_;
  DeviceArray<std::uint8_t> workspace_;  ///< of GEMMs
  LinearKernels kernels_;
  Mixtures mixtures_;
  int head_rows_ = 0;
  std::vector<BoundOp> ops_;
  std::vector<KvLayerView> layers_;

  DeviceArray<std::uint8_t> arena_;
  DeviceArray<Bf16> normed_;         ///< [rows, widest input of a linear]: after a norm, where weights are not FP8
  DeviceArray<std::uint8_t> codes_;  ///< E4M3, likewise, where they are
  DeviceArray<float> code_scales_;   ///< [rows, 1 or k / 128]
  DeviceArray<Bf16> product_;        ///< [rows, widest QKV or product before a norm]
  DeviceArray<Bf16> head_input_;     ///< [head_rows, hidden_size]
  DeviceArray<float> logits_;        ///< [head_rows, vocab_size / ranks]: this rank's
  DeviceArray<std::uint8_t> attention_workspace_;
  DeviceArray<std::uint8_t> sampling_workspace_;
  LayerChains chains_;  ///< over these
};

}  // namespace aotllm::cuda
