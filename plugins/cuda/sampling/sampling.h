#pragma once

#include <cstddef>
#include <cstdint>

#include "aotllm/model_runner.h"
#include "launch.h"

namespace aotllm::cuda {

/// Count of a token that is in the prompt; the other bits tell how often it was generated.
constexpr std::uint32_t kSeenInPrompt = 0x80000000U;

/// The largest vocabulary of `sample` and `row_logprobs`: eight blocks hold a row in their shared memory.
constexpr int kMaxSampledVocab = 300'000;

/// What is sampled in a step: rows of logits, each with its parameters. All pointers are on the device.
struct SamplingArgs {
  const float* logits = nullptr;  ///< [rows, vocab_size]; stay as they are
  int vocab_size = 0;
  int num_rows = 0;                         ///< rows that are sampled
  const RowSampling* params = nullptr;      ///< [num_rows]
  const std::uint32_t* masks = nullptr;     ///< grammar masks [.., ceil(vocab_size / 32)], indexed by RowSampling::mask
  const RowPenalties* penalties = nullptr;  ///< [num_rows]; null = none. `sample` only
  const std::uint32_t* counts = nullptr;    ///< [slots, vocab_size], see count_tokens
  std::int32_t* tokens = nullptr;           ///< [num_rows], written; kDamagedRow or kNothingAllowed where there is none
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;  ///< at least sampling_workspace_bytes
};
/// Of `sample` and `row_logprobs` with kernels for `sm`. None from SM90 on: blocks of a cluster have a row in their
/// shared memory; before, it is copied to the workspace.
std::size_t sampling_workspace_bytes(int num_rows, int vocab_size, int sm = 90);
/// Throws Error(kInternal) where `bytes` are too few for a launch on `stream`.
void check_sampling_workspace(std::size_t bytes, int num_rows, int vocab_size, const Stream& stream);

/// Only greedy rows (temperature 0, no mask): arg-max, the lowest id among equals.
void sample_greedy(const SamplingArgs& args, const Stream& stream);
/// Any rows: mask → penalties → temperature → min_p → top_k → top_p → draw, each as `Sampler` does on the CPU; for
/// vocab_size up to kMaxSampledVocab. Sums are exact, in units of 2^-45 of the largest probability, where the CPU
/// rounds sums of doubles: the two may choose different tokens where a draw or top_p comes that close to the border
/// between two tokens.
void sample(const SamplingArgs& args, const Stream& stream);

/// Tokens of texts, each with the slot where its sequence's are counted. All pointers are on the device.
struct CountArgs {
  std::uint32_t* counts = nullptr;  ///< [slots, vocab_size]
  int vocab_size = 0;
  int num_tokens = 0;
  const std::int32_t* tokens = nullptr;  ///< [num_tokens]; -1 = none
  const std::int32_t* slots = nullptr;   ///< [num_tokens]; -1 = not counted
  bool in_prompt = false;                ///< of the prompts, else generated
};
void count_tokens(const CountArgs& args, const Stream& stream);
/// Sets the counts of `slots` [num_slots] to 0, for other sequences.
void clear_counts(std::uint32_t* counts, int vocab_size, const std::int32_t* slots, int num_slots,
                  const Stream& stream);

/// Most tokens that row_logprobs lists.
constexpr int kMaxTopLogprobs = 256;

/// What is known of rows, as `Sampler::logprobs` says it. All pointers are on the device.
struct RowLogprobsArgs {
  const float* logits = nullptr;  ///< [.., vocab_size]
  int vocab_size = 0;
  int num_rows = 0;
  const std::int32_t* rows = nullptr;    ///< [num_rows], row of `logits`; null = i
  const std::int32_t* tokens = nullptr;  ///< [.., of each row of `logits`], whose log-probability is asked for
  int num_top = 0;                       ///< most likely tokens that are listed; ≤ kMaxTopLogprobs
  double* logprobs = nullptr;            ///< [num_rows]; NaN where the row is damaged or the token none of it
  std::int32_t* top_ids = nullptr;       ///< [num_rows, num_top], most likely first; -1 where there are no more
  double* top_logprobs = nullptr;        ///< [num_rows, num_top]; NaN likewise
  void* workspace = nullptr;             ///< 16-byte aligned, as in SamplingArgs
  std::size_t workspace_bytes = 0;       ///< at least sampling_workspace_bytes
};
/// Log-probabilities under softmax(logits), to within 4e-9.
void row_logprobs(const RowLogprobsArgs& args, const Stream& stream);

}  // namespace aotllm::cuda
