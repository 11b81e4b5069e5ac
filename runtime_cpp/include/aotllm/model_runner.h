#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace aotllm {

using TokenId = std::int32_t;
using BlockId = std::int32_t;

/// What the manager must know of a loaded engine.
struct ModelShape {
  std::int32_t vocab_size = 0;
  std::int32_t num_layers = 0;
  std::int32_t max_seq_len = 0;         ///< longest sequence, prompt + generated
  std::int32_t max_num_tokens = 0;      ///< most tokens in one step, over all sequences
  std::int32_t max_batch_size = 0;      ///< most sequences in one step
  std::int32_t tokens_per_block = 0;    ///< KV block size in tokens
  std::int64_t kv_bytes_per_block = 0;  ///< bytes of one KV block over all layers, K and V
};

/// Which rows of a sequence's tokens need logits.
enum class LogitsMode : std::uint8_t {
  kNone,  ///< a context chunk that is not the last
  kLast,  ///< the last token only
  kAll,   ///< every token (scoring, prompt log-probabilities)
};

/// One sequence's part of a step: a context chunk, or one token (plus drafts) of a generation.
struct SequenceStep {
  std::span<const TokenId> tokens;       ///< tokens to run, at positions start_position, start_position + 1, …
  std::int32_t start_position = 0;       ///< tokens already in the KV cache
  std::span<const BlockId> block_table;  ///< covers positions [0, start_position + tokens.size())
  LogitsMode logits = LogitsMode::kLast;
};

/// Logits of one step; reused from step to step.
struct StepOutputs {
  std::int32_t vocab_size = 0;
  std::vector<float> logits;  ///< [rows, vocab_size], in order of sequences, then of their tokens

  std::int32_t rows() const { return vocab_size == 0 ? 0 : static_cast<std::int32_t>(logits.size()) / vocab_size; }
  std::span<float> row(std::int32_t i) {
    return std::span<float>(logits).subspan(static_cast<std::size_t>(i) * vocab_size, vocab_size);
  }
};

/// Runs steps of one engine on one target. The runner knows sequences and blocks, never requests.
///
/// Not thread-safe: one thread calls `step`. On CPU the logits of a token depend only on the tokens at and before its
/// position, bit for bit.
class ModelRunner {
 public:
  virtual ~ModelRunner() = default;

  virtual const ModelShape& shape() const = 0;

  /// Reserves KV memory for block ids [0, num_blocks). Called once, before the first step. Throws
  /// Error(kInvalidRequest) where the memory cannot be had.
  virtual void allocate_kv(std::int32_t num_blocks) = 0;

  /// Runs all tokens of `sequences`: writes their K and V into their blocks and the logits asked for into `outputs`.
  /// Preconditions: 1 ≤ total tokens ≤ max_num_tokens, token ids in [0, vocab_size), block tables long enough.
  /// Throws Error(kInternal) where one is broken.
  virtual void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) = 0;

  /// Copies the K and V of a block (copy-on-write of a shared, partly filled block).
  virtual void copy_block(BlockId from, BlockId to) = 0;
};

}  // namespace aotllm
