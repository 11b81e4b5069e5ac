#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"

namespace aotllm {

/// The sequences of a step laid flat: one row per token. Its memory is reserved once.
class StepBatch {
 public:
  explicit StepBatch(const ModelShape& shape);

  /// Takes over a step's tokens; `sequences` and their block tables are only viewed. Throws Error(kInternal) naming the
  /// sequence and the broken precondition of `ModelRunner::step`; ids are checked here so that no op need do it.
  void assign(std::span<const SequenceStep> sequences, const BlockCounts& num_blocks);

  int rows() const noexcept { return static_cast<int>(tokens_.size()); }
  TokenId token(int row) const noexcept { return tokens_[row]; }
  std::int32_t position(int row) const noexcept { return positions_[row]; }
  /// The row after the last one of `row`'s sequence; rows of a sequence stand together, in order of positions.
  int sequence_end(int row) const noexcept { return sequence_ends_[row]; }
  AdapterId adapter(int row) const noexcept { return sequences_[row]->adapter; }
  /// Of the row's sequence in a KV group; entries that no row of the sequence sees in this group may be anything.
  const BlockId* block_table(int row, int group) const noexcept { return sequences_[row]->block_tables[group].data(); }
  /// Rows whose logits are wanted, ascending.
  std::span<const std::int32_t> logit_rows() const noexcept { return logit_rows_; }
  /// Rows whose hidden states are wanted, ascending.
  std::span<const std::int32_t> hidden_rows() const noexcept { return hidden_rows_; }

 private:
  void check(const SequenceStep& sequence, std::size_t index) const;
  void check_blocks(const SequenceStep& sequence, std::size_t index, int group, std::int32_t num_blocks) const;

  ModelShape shape_;
  std::vector<TokenId> tokens_;
  std::vector<std::int32_t> positions_;
  std::vector<const SequenceStep*> sequences_;  ///< of each row
  std::vector<std::int32_t> sequence_ends_;     ///< likewise
  std::vector<std::int32_t> logit_rows_;
  std::vector<std::int32_t> hidden_rows_;
};

}  // namespace aotllm
