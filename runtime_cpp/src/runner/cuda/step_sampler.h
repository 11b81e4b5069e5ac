#pragma once

#include <cstdint>
#include <span>

#include "aotllm/model_runner.h"
#include "device_array.h"
#include "launch.h"
#include "runner/cuda/pinned.h"
#include "runner/cuda/step_data.h"
#include "runner/cuda/token_counter.h"

namespace aotllm::cuda {

/// What the first rank of an engine samples with: the tokens that steps give, and all that rows with masks, penalties
/// or log-probabilities need beside their logits. Such rows are sampled behind the step's graph, which ends with their
/// logits then: masks are still being made while it runs.
class StepSampler {
 public:
  /// What it does for engines of `shape`; nothing where their vocabulary is too large.
  static SamplingSupport support(const ModelShape& shape);
  static bool samples(const ModelShape& shape);

  StepSampler() = default;  ///< of other ranks
  /// For up to `max_rows` rows a step. Reserves all memory.
  StepSampler(const ModelShape& shape, int max_rows);

  /// Where sampled tokens go, and stay until the next step samples: [max_rows], on the device.
  std::int32_t* tokens() const { return drawn_.data(); }

  /// Samples the rows of a step whose shape says `late`, from `logits` [shape.sampled, vocab_size]. Waits for masks.
  /// `workspace` is of sampling_workspace_bytes.
  void sample(std::span<const SequenceStep> sequences, const StepView& step, const float* logits, const Stream& stream,
              std::span<std::uint8_t> workspace = {});

  /// What the rows of a step need.
  struct Needs {
    int rows = 0;
    bool greedy = true;  ///< all of them, without mask and penalties
    bool penalties = false;
    StepMasks* masks = nullptr;
    int logprobs = 0;  ///< rows
    int num_top = 0;
  };
  static Needs needs_of(std::span<const SequenceStep> sequences);

  /// Behind all that samples: the tokens of a step's rows go to the host. Of two steps under way each has a `turn`, 0
  /// or 1.
  void fetch(const Needs& needs, int turn, cudaStream_t stream);
  /// Of a step that has ended, what its rows gave.
  void take(const Needs& needs, int turn, StepOutputs& outputs) const;

 private:
  void upload(StepMasks& masks, cudaStream_t stream);

  ModelShape shape_;
  TokenCounter counter_;
  int max_rows_ = 0;
  DeviceArray<std::int32_t> drawn_;       ///< [max_rows], written by the kernels
  PinnedArray<std::int32_t> tokens_;      ///< [2 turns, max_rows]
  PinnedArray<std::uint32_t> masks_;      ///< [max_rows, ⌈vocab_size / 32⌉], on their way to the device
  DeviceArray<std::uint32_t> on_device_;  ///< the same there
  PinnedArray<double> logprobs_;          ///< [max_rows], written by the kernels in place, as what follows
  PinnedArray<std::int32_t> top_ids_;     ///< [max_rows, most that is listed]
  PinnedArray<double> top_logprobs_;      ///< likewise
};

}  // namespace aotllm::cuda
