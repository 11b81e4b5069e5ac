#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"
#include "attention/attention.h"
#include "device_array.h"
#include "engine/plan.h"
#include "runner/cuda/pinned.h"

namespace aotllm::cuda {

/// What a step is made of, in sizes that are fixed when a CUDA graph is captured. Padding makes them coarse.
struct StepShape {
  int rows = 0;          ///< tokens
  int num_queries = 0;   ///< sequences of one token: decode attention
  int num_tiles = 0;     ///< tiles of longer ones: context attention
  int max_context = 0;   ///< bound of the contexts of the queries
  int sequences = 0;     ///< block tables
  int table_blocks = 0;  ///< entries of each of them
  int sampled = 0;       ///< rows that are sampled
  bool greedy = true;    ///< all of these are
  bool late = false;     ///< some of them have masks, penalties or log-probabilities: see StepSampler
  int host_rows = 0;     ///< rows whose logits or hidden states go to the host; no graph contains them

  friend auto operator<=>(const StepShape&, const StepShape&) = default;
};

/// Where the parts of a step lie on the device.
struct StepView {
  const std::int32_t* tokens = nullptr;        ///< [rows]; -1 - i = what the step before sampled as i
  const std::int32_t* positions = nullptr;     ///< [rows]
  const std::int32_t* sequences = nullptr;     ///< [rows]; -1 = padding
  const std::int32_t* sampled_rows = nullptr;  ///< [sampled]
  const std::int32_t* host_rows = nullptr;     ///< [host_rows]: of logits, then of hidden states
  const DecodeQuery* queries = nullptr;
  const ContextTile* tiles = nullptr;
  const RowSampling* sampling = nullptr;                         ///< [sampled]
  const RowPenalties* penalties = nullptr;                       ///< [sampled] of a late step
  const std::int32_t* logprob_rows = nullptr;                    ///< likewise: those with log-probabilities, packed
  std::array<const std::int32_t*, kMaxKvGroups> block_tables{};  ///< [sequences, table_blocks]
};

/// Entries of block tables for contexts of up to `context` tokens.
constexpr int table_blocks(int context, int tokens_per_block) {
  return (context + tokens_per_block - 1) / tokens_per_block;
}

/// No step of `model` is larger, padded or not.
StepShape largest_shape(const ModelShape& model);

/// Packs a step into one piece of page-locked memory and copies it to the device at once.
class StepData {
 public:
  explicit StepData(const ModelShape& shape);

  /// Lays out `sequences`, whose soundness was checked, for a step of `shape`, which is at least as large. Rows beyond
  /// are padding: token 0 of no sequence. What was packed before the last time must have been copied.
  void pack(std::span<const SequenceStep> sequences, const StepShape& shape);
  /// The smallest shape that holds them. `always_tiles`: decode steps use context attention, too.
  StepShape shape_of(std::span<const SequenceStep> sequences, bool always_tiles) const;

  void upload(cudaStream_t stream) const;
  StepView view(const StepShape& shape) const;

  /// Rows of the step whose logits, and whose hidden states, go to the host, in the order of ModelRunner::step.
  int num_logit_rows() const noexcept { return static_cast<int>(logit_rows_.size()); }
  int num_hidden_rows() const noexcept { return static_cast<int>(hidden_rows_.size()); }

 private:
  struct Offsets;
  Offsets offsets(const StepShape& shape) const;
  template <class T>
  T* at(std::size_t offset) {
    return reinterpret_cast<T*>(host_[turn_].data() + offset);
  }
  void pack_rows(std::span<const SequenceStep> sequences, const StepShape& shape, const Offsets& to);
  void pack_attention(std::span<const SequenceStep> sequences, const StepShape& shape, const Offsets& to);
  void pack_outputs(std::span<const SequenceStep> sequences, const StepShape& shape, const Offsets& to);

  int num_groups_;
  int tokens_per_block_;
  std::array<PinnedArray<std::uint8_t>, 2> host_;  ///< in turns: one may still be on its way
  std::size_t turn_ = 0;
  DeviceArray<std::uint8_t> device_;
  std::size_t bytes_ = 0;  ///< of the step that is packed
  std::vector<std::int32_t> logit_rows_;
  std::vector<std::int32_t> hidden_rows_;
};

}  // namespace aotllm::cuda
