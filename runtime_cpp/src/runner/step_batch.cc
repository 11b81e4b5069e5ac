#include "runner/step_batch.h"

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

template <class... Args>
[[noreturn]] void fail(const Args&... args) {
  throw Error(ErrorKind::kInternal, cat("step: ", args...));
}

}  // namespace

StepBatch::StepBatch(const ModelShape& shape) : shape_(shape) {
  const auto rows = static_cast<std::size_t>(shape.max_num_tokens);
  tokens_.reserve(rows);
  positions_.reserve(rows);
  block_tables_.reserve(rows);
  logit_rows_.reserve(rows);
}

void StepBatch::check(const SequenceStep& sequence, std::size_t index, std::int32_t num_blocks) const {
  const auto length = static_cast<std::int64_t>(sequence.tokens.size());
  if (sequence.start_position < 0 || sequence.start_position + length > shape_.max_seq_len) {
    fail("sequence ", index, ": expected positions in [0, ", shape_.max_seq_len, "), got ", length, " tokens from ",
         sequence.start_position);
  }
  for (const TokenId token : sequence.tokens) {
    if (token < 0 || token >= shape_.vocab_size) {
      fail("sequence ", index, ": expected token ids in [0, ", shape_.vocab_size, "), got ", token);
    }
  }
  const std::int64_t blocks =
      (sequence.start_position + length + shape_.tokens_per_block - 1) / shape_.tokens_per_block;
  if (static_cast<std::int64_t>(sequence.block_table.size()) < blocks) {
    fail("sequence ", index, ": expected a block table of at least ", blocks, " blocks, got ",
         sequence.block_table.size());
  }
  for (const BlockId block : sequence.block_table.first(static_cast<std::size_t>(blocks))) {
    if (block < 0 || block >= num_blocks) {
      fail("sequence ", index, ": expected block ids in [0, ", num_blocks, "), got ", block);
    }
  }
}

void StepBatch::assign(std::span<const SequenceStep> sequences, std::int32_t num_blocks) {
  tokens_.clear();
  positions_.clear();
  block_tables_.clear();
  logit_rows_.clear();
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const SequenceStep& sequence = sequences[i];
    const std::size_t length = sequence.tokens.size();
    if (length == 0) fail("sequence ", i, ": expected at least 1 token, got none");
    if (length > static_cast<std::size_t>(shape_.max_num_tokens) - tokens_.size()) {
      fail("expected at most ", shape_.max_num_tokens, " tokens, got more");
    }
    check(sequence, i, num_blocks);
    for (std::size_t t = 0; t < length; ++t) {
      const bool last = t + 1 == length;
      if (sequence.logits == LogitsMode::kAll || (sequence.logits == LogitsMode::kLast && last)) {
        logit_rows_.push_back(static_cast<std::int32_t>(tokens_.size()));
      }
      tokens_.push_back(sequence.tokens[t]);
      positions_.push_back(sequence.start_position + static_cast<std::int32_t>(t));
      block_tables_.push_back(sequence.block_table.data());
    }
  }
  if (tokens_.empty()) fail("expected at least 1 token, got none");
}

}  // namespace aotllm
