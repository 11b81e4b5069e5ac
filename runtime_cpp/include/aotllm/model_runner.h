#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {

struct Adapter;

using TokenId = std::int32_t;
using BlockId = std::int32_t;

/// Identifies a loaded adapter; never reused in a process's life. 0 = the bare model.
using AdapterId = std::int32_t;

/// No block: the position has left the window of its group, and its K and V are gone.
inline constexpr BlockId kNoBlock = -1;

/// Most groups of layers that a model may have.
inline constexpr int kMaxKvGroups = 4;

/// A number of KV blocks for each group.
using BlockCounts = std::array<std::int32_t, kMaxKvGroups>;

/// Layers that see equally far back, so that their K and V of a block of tokens live and die together.
struct KvGroupShape {
  std::int32_t window = 0;           ///< a token at p sees (p - window, p]; 0 = all before it
  std::int64_t bytes_per_block = 0;  ///< of one block over the group's layers, K and V
};

/// What the manager must know of a loaded engine.
struct ModelShape {
  std::int32_t vocab_size = 0;
  std::int32_t hidden_size = 0;  ///< width of a token's hidden state; 0 = the target does not give it
  std::int32_t num_layers = 0;
  std::int32_t max_seq_len = 0;           ///< longest sequence, prompt + generated
  std::int32_t max_num_tokens = 0;        ///< most tokens in one step, over all sequences
  std::int32_t max_batch_size = 0;        ///< most sequences in one step
  std::int32_t tokens_per_block = 0;      ///< KV block size in tokens
  std::vector<KvGroupShape> kv_groups{};  ///< 1 to kMaxKvGroups; full attention first, then by window, largest first
};

/// Which rows of a sequence's tokens need logits, or hidden states.
enum class LogitsMode : std::uint8_t {
  kNone,  ///< a context chunk that is not the last
  kLast,  ///< the last token only
  kAll,   ///< every token (scoring, prompt log-probabilities, pooling over the prompt)
};

/// What a runner that samples says in place of a token: a logit is NaN or +inf.
inline constexpr TokenId kDamagedRow = -1;
/// Likewise: all logits are -inf, or forbidden by the row's mask.
inline constexpr TokenId kNothingAllowed = -2;

/// How a runner that samples chooses the token of a row. The meaning, and the draw, are those of `Sampler`.
struct RowSampling {
  float temperature = 0.0f;  ///< 0 = greedy
  std::int32_t top_k = 0;    ///< ≤ 0 = all
  float top_p = 1.0f;
  float min_p = 0.0f;
  std::uint64_t seed = 0;
  std::uint32_t position = 0;  ///< tokens before the one that is drawn
  std::uint32_t sequence_index = 0;
  std::int32_t mask = -1;          ///< the row's mask among SequenceStep::masks; -1 = all tokens
  std::int32_t num_logprobs = -1;  ///< n ≥ 0: log-probabilities of the token and of the n most likely ones, too
};

/// Penalties of a row, with the meaning of those of SamplingParams.
struct RowPenalties {
  double repetition = 1.0;
  double presence = 0.0;
  double frequency = 0.0;
  std::int32_t slot = -1;  ///< where the runner counts the tokens of the sequence; -1 = no penalties
};

/// The text that the penalties of a row look at. A slot belongs to one sequence at a time, and counts its tokens from
/// step to step.
struct CountedText {
  std::span<const TokenId> tokens;  ///< prompt, then generated: all before the token that is drawn
  std::int32_t num_prompt_tokens = 0;
  std::int32_t num_counted = 0;  ///< of these, those that the slot has counted; 0 = it was nobody's, or another's
};

/// Masks of the rows that are sampled, which are made while the layers run.
class StepMasks {
 public:
  virtual ~StepMasks() = default;

  /// Words of all of them: [masks, ⌈vocab_size / 32⌉], bit t % 32 of word t / 32 allows token t.
  virtual std::size_t size() const = 0;

  /// Waits until more than the first `seen` words are made, seen < size(), and returns those that are, so that what is
  /// made can go on its way before the rest is. They stay until the step has ended.
  virtual std::span<const std::uint32_t> wait(std::size_t seen) = 0;
};

/// What a runner that samples can do beside drawing from the model's own distribution. Sequences that need more get
/// logits.
struct SamplingSupport {
  bool masks = false;
  std::int32_t count_slots = 0;    ///< sequences whose tokens are counted at a time; 0 = no penalties
  std::int32_t max_logprobs = -1;  ///< the largest RowSampling::num_logprobs; -1 = no log-probabilities
};

/// One sequence's part of a step: a context chunk, or one token (plus drafts) of a generation.
struct SequenceStep {
  std::span<const TokenId> tokens;  ///< tokens to run, at positions start_position, start_position + 1, …
  std::int32_t start_position = 0;  ///< tokens already in the KV cache
  /// By group: entry i holds positions [i · tokens_per_block, (i + 1) · tokens_per_block), and the entries cover
  /// [0, start_position + tokens.size()). Entries that no token of the step sees may be kNoBlock.
  std::array<std::span<const BlockId>, kMaxKvGroups> block_tables{};
  LogitsMode logits = LogitsMode::kLast;
  AdapterId adapter = 0;
  bool hidden = false;  ///< the rows asked for are hidden states after the final norm, in place of logits
  /// The runner samples: LogitsMode::kLast gives a token in place of logits. Only where ModelRunner::samples(). What
  /// follows is for such rows, where ModelRunner::sampling_support() has it.
  std::optional<RowSampling> sampling{};
  RowPenalties penalties{};
  CountedText text{};          ///< where penalties.slot ≥ 0
  StepMasks* masks = nullptr;  ///< where sampling->mask ≥ 0: those of the step
  /// ≥ 0: its only token is not known yet; it is the one that the step queued before draws as this one of
  /// StepOutputs::tokens. What `tokens` holds means nothing then.
  std::int32_t fed = -1;

  /// Tokens that give a row, the last ones of `tokens`: logits, or the hidden state, or a token where `is_sampled`.
  std::size_t num_output_rows() const noexcept {
    if (logits == LogitsMode::kNone) return 0;
    return logits == LogitsMode::kAll ? tokens.size() : 1;
  }
  bool is_sampled() const noexcept { return sampling.has_value() && logits == LogitsMode::kLast && !hidden; }
};

/// Where KV blocks are: the device's memory, which steps read and write, or the host's, which only keeps them. Each
/// numbers its blocks from 0.
enum class KvTier : std::uint8_t { kDevice, kHost };

/// A copy of the K and V of one block, over all layers of a group.
struct BlockCopy {
  std::int32_t group = 0;
  KvTier from_tier = KvTier::kDevice;
  BlockId from = 0;
  KvTier to_tier = KvTier::kDevice;
  BlockId to = 0;

  friend bool operator==(const BlockCopy&, const BlockCopy&) = default;
};

/// Blocks to reserve, by group and tier.
struct KvAllocation {
  BlockCounts device_blocks{};
  BlockCounts host_blocks{};  ///< 0 = no host tier
};

/// Memory that KV blocks may take, before they are allocated.
struct FreeMemory {
  std::optional<std::int64_t> device_bytes;  ///< nullopt = not known
  std::optional<std::int64_t> host_bytes;    ///< for the host tier; the same memory where `shared`
  bool shared = true;                        ///< the device's memory is the host's

  static FreeMemory of_host(std::optional<std::int64_t> bytes) { return {bytes, bytes, true}; }
};

/// Log-probabilities of the drawn tokens whose rows ask for them, in order, as `Sampler::logprobs` says them.
struct DrawnLogprobs {
  std::int32_t num_top = 0;          ///< places of a list: the largest RowSampling::num_logprobs of the step
  std::vector<double> logprobs;      ///< [rows]; NaN where a logit is NaN or +inf
  std::vector<TokenId> top_ids;      ///< [rows, num_top], most likely first; -1 where there are no more tokens
  std::vector<double> top_logprobs;  ///< [rows, num_top]
};

/// Logits and hidden states of one step; reused from step to step.
struct StepOutputs {
  std::int32_t vocab_size = 0;
  std::int32_t hidden_size = 0;
  std::vector<float> logits;  ///< [rows, vocab_size], in order of sequences, then of their tokens
  std::vector<float> hidden;  ///< [hidden rows, hidden_size], likewise, of the sequences that ask for them
  /// Of the sequences that the runner samples, in order; kDamagedRow or kNothingAllowed where no token can be had.
  std::vector<TokenId> tokens;
  DrawnLogprobs drawn_logprobs;

  std::int32_t rows() const { return vocab_size == 0 ? 0 : static_cast<std::int32_t>(logits.size()) / vocab_size; }
  std::span<float> row(std::int32_t i) {
    return std::span<float>(logits).subspan(static_cast<std::size_t>(i) * vocab_size, vocab_size);
  }
  std::span<float> hidden_row(std::int32_t i) {
    return std::span<float>(hidden).subspan(static_cast<std::size_t>(i) * hidden_size, hidden_size);
  }
};

/// Runs steps of one engine on one target. The runner knows sequences and blocks, never requests.
///
/// Not thread-safe: one thread calls `step`. On CPU the logits and the hidden state of a token depend only on the
/// tokens at and before its position, bit for bit.
class ModelRunner {
 public:
  virtual ~ModelRunner() = default;

  virtual const ModelShape& shape() const = 0;

  /// What is free for KV memory. The default is the host's memory for both tiers.
  virtual FreeMemory free_memory() const;

  /// Reserves KV memory. Called once, before the first step. Throws Error(kInvalidRequest) where the memory cannot be
  /// had.
  virtual void allocate_kv(const KvAllocation& allocation) = 0;

  /// Runs all tokens of `sequences`: writes their K and V into their blocks and the rows asked for into `outputs`.
  /// Preconditions: 1 ≤ total tokens ≤ max_num_tokens, token ids in [0, vocab_size), block tables long enough,
  /// adapters loaded.
  /// Throws Error(kInternal) where one is broken.
  virtual void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) = 0;

  /// Whether steps may ask for tokens in place of logits.
  virtual bool samples() const noexcept { return false; }

  /// What it can do with a row beyond a plain draw, where samples(). The same in all its life.
  virtual SamplingSupport sampling_support() const noexcept { return {}; }

  /// Whether steps may be queued: begun while another one runs, with tokens that it has yet to draw.
  virtual bool queues() const noexcept { return false; }

  /// Begins a step and returns, at most the second of those under way; where one is, no row of this one may go to the
  /// host. `sequences`, and what they point to, may change afterwards. Otherwise as `step`; where `queue` or `finish`
  /// throws, no step is under way any more. Only where queues().
  virtual void queue(std::span<const SequenceStep> /*sequences*/) {
    throw Error(ErrorKind::kInternal, "this runner has no queue of steps");
  }

  /// Waits for the first step under way and says what came of it.
  virtual void finish(StepOutputs& /*outputs*/) {
    throw Error(ErrorKind::kInternal, "this runner has no queue of steps");
  }

  /// Copies blocks, in order, behind the steps under way. Throws Error(kInternal) for an id that is out of range.
  virtual void copy_blocks(std::span<const BlockCopy> copies) = 0;

  /// Makes `adapter` available to steps as `id`, at least 1 and not loaded. Called between steps, by the thread that
  /// steps; either it is loaded or nothing has changed. Throws Error(kInvalidRequest) where it does not fit the model
  /// or the target has no adapters, Error(kInternal) for such an id, std::bad_alloc.
  virtual void load_adapter(AdapterId /*id*/, const Adapter& /*adapter*/) {
    throw Error(ErrorKind::kInvalidRequest, "this target has no adapters", "adapter");
  }

  /// Frees a loaded adapter; likewise between steps. Throws Error(kInternal) for an id that is not loaded.
  virtual void unload_adapter(AdapterId /*id*/) {
    throw Error(ErrorKind::kInvalidRequest, "this target has no adapters", "adapter");
  }

  /// Why the engine's tactics.json is left aside; empty = it is not, or there is none.
  virtual std::string tactics_note() const { return {}; }

  /// Bytes of memory that loaded adapters take, with what steps need for them.
  virtual std::int64_t adapter_bytes() const noexcept { return 0; }
};

}  // namespace aotllm
