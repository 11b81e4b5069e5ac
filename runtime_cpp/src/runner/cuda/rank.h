#pragma once

#include <array>
#include <deque>
#include <memory>
#include <span>

#include "aotllm/cuda_runner.h"
#include "aotllm/engine.h"
#include "comm/communicator.h"
#include "runner/cuda/kv_memory.h"
#include "runner/cuda/pinned.h"
#include "runner/cuda/program.h"
#include "runner/cuda/stage_link.h"
#include "runner/cuda/step_data.h"
#include "runner/cuda/step_graphs.h"
#include "runner/cuda/step_sampler.h"
#include "runner/cuda/weight_store.h"
#include "runner/step_batch.h"

namespace aotllm::cuda {

/// Throws Error(kEngineIncompatible) for an engine of another target.
void check_target(const Plan& plan);

/// What steps of target cuda ask of their sequences: checked once, by the thread that steps, before any rank runs.
class StepCheck {
 public:
  explicit StepCheck(const ModelShape& shape)
      : batch_(shape), max_batch_size_(shape.max_batch_size), support_(StepSampler::support(shape)) {}
  /// Throws Error(kInternal) where a precondition of ModelRunner::step is broken.
  void operator()(std::span<const SequenceStep> sequences, const BlockCounts& num_blocks);

 private:
  void check_sampling(const SequenceStep& sequence) const;

  StepBatch batch_;
  int max_batch_size_;
  SamplingSupport support_;
};

/// One rank of an engine on its device: weights, KV blocks, scratch, stream and graphs. Used by one thread, whose
/// device `select` has made this rank's.
class Rank {
 public:
  /// `ranks` joins it to the others; null where it is alone. `options.device` is this rank's, and
  /// open_device was called for it and made it the thread's. Throws as CudaRunner.
  Rank(Engine engine, const CudaRunnerOptions& options, OwnedStream stream, std::unique_ptr<Communicator> ranks);

  void select() const;
  const Engine& engine() const noexcept { return engine_; }
  const KvAllocation& kv_allocation() const noexcept { return kv_.allocation(); }

  /// Joins it to the ranks of the same place in the stages before and after it; the links live as long as steps run,
  /// null = there is no such stage.
  void join(StageLink* before, StageLink* after) noexcept;
  /// Where the stage before puts the residual stream; null for the first.
  void* entering() const { return program_.entering(); }

  void allocate_kv(const KvAllocation& allocation);
  /// Does not wait for the copies; the next step does.
  void copy_blocks(std::span<const BlockCopy> copies) const { kv_.copy(copies, stream_.handle()); }

  /// Begins a step that was checked, behind at most one other. Where rows go to the host, none may be under way; it
  /// waits for them.
  void begin(std::span<const SequenceStep> sequences);
  /// Waits for the first step under way. Only the first rank of the last stage writes
  /// `outputs`.
  void finish(StepOutputs& outputs);
  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs);
  /// Waits for the steps under way, if it can, and forgets them.
  void abandon() noexcept;

 private:
  /// A step under way.
  struct Begun {
    StepSampler::Needs needs;
    int turn = 0;
  };

  void run(const StepShape& shape);
  void copy_rows(const StepShape& shape);
  void settle() const;
  std::int32_t* sampled_tokens() const { return is_first() ? sampler_.tokens() : nullptr; }
  Stream launches() const noexcept {
    const int sm = engine_.plan().sm;
    return {stream_.handle(), sm >= 90 && (ranks_ == nullptr || !ranks_->shares_device()), sm};
  }
  /// The first of those that have the head.
  bool is_first() const noexcept {
    return engine_.plan().is_last_stage() && (ranks_ == nullptr || ranks_->rank() == 0);
  }

  CudaRunnerOptions options_;
  Engine engine_;
  std::unique_ptr<Communicator> ranks_;
  WeightStore weights_;
  Program program_;
  OwnedStream stream_;
  StepData data_;
  KvBlocks kv_;
  StageLink* before_ = nullptr;
  StageLink* after_ = nullptr;
  StepGraphs graphs_;
  StepSampler sampler_;
  std::array<OwnedEvent, 2> ends_;  ///< of the steps, by turn
  std::deque<Begun> begun_;
  int turn_ = 0;
  StepOutputs host_rows_;    ///< of the step under way that has some
  PinnedArray<float> rows_;  ///< [head_rows, vocab_size], on their way to the caller
};

}  // namespace aotllm::cuda
