#include "runner/step_batch.h"

#include <algorithm>

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
  sequences_.reserve(rows);
  sequence_ends_.reserve(rows);
  logit_rows_.reserve(rows);
  hidden_rows_.reserve(rows);
}

void StepBatch::check(const SequenceStep& sequence, std::size_t index) const {
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
}

// Attention reads K and V in parts of 16 tokens, which never reach over a block, of which the step sees a token. So
// exactly the entries from the first token's window to the last token are looked at.
void StepBatch::check_blocks(const SequenceStep& sequence, std::size_t index, int group,
                             std::int32_t num_blocks) const {
  const std::span<const BlockId> table = sequence.block_tables[group];
  const std::int32_t window = shape_.kv_groups[group].window;
  const std::int32_t end_position = sequence.start_position + static_cast<std::int32_t>(sequence.tokens.size());
  const std::int32_t first_seen = window == 0 ? 0 : std::max(0, sequence.start_position - window + 1);
  const std::int32_t begin = first_seen / shape_.tokens_per_block;
  const std::int32_t end = (end_position - 1) / shape_.tokens_per_block + 1;
  if (std::ssize(table) < end) {
    fail("sequence ", index, ", KV group ", group, ": expected a block table of at least ", end, " blocks, got ",
         table.size());
  }
  const std::span<const BlockId> seen = table.subspan(begin, end - begin);
  // No way out of the loop, so that it is done many entries at a time: a long context has thousands.
  const auto limit = static_cast<std::uint32_t>(num_blocks);
  std::uint32_t largest = 0;
  for (const BlockId block : seen) largest = std::max(largest, static_cast<std::uint32_t>(block));  // -1 is the largest
  if (largest < limit) return;
  const auto wrong =
      std::ranges::find_if(seen, [=](BlockId block) { return static_cast<std::uint32_t>(block) >= limit; });
  fail("sequence ", index, ", KV group ", group, ": expected block ids in [0, ", num_blocks, "), got ", *wrong, " at ",
       begin + (wrong - seen.begin()));
}

void StepBatch::assign(std::span<const SequenceStep> sequences, const BlockCounts& num_blocks) {
  tokens_.clear();
  positions_.clear();
  sequences_.clear();
  sequence_ends_.clear();
  logit_rows_.clear();
  hidden_rows_.clear();
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const SequenceStep& sequence = sequences[i];
    const std::size_t length = sequence.tokens.size();
    if (length == 0) fail("sequence ", i, ": expected at least 1 token, got none");
    if (length > static_cast<std::size_t>(shape_.max_num_tokens) - tokens_.size()) {
      fail("expected at most ", shape_.max_num_tokens, " tokens, got more");
    }
    check(sequence, i);
    for (int group = 0; group < static_cast<int>(shape_.kv_groups.size()); ++group) {
      check_blocks(sequence, i, group, num_blocks[group]);
    }
    sequence_ends_.insert(sequence_ends_.end(), length, static_cast<std::int32_t>(tokens_.size() + length));
    const std::size_t first_output = length - sequence.num_output_rows();
    for (std::size_t t = 0; t < length; ++t) {
      if (t >= first_output) {
        (sequence.hidden ? hidden_rows_ : logit_rows_).push_back(static_cast<std::int32_t>(tokens_.size()));
      }
      tokens_.push_back(sequence.tokens[t]);
      positions_.push_back(sequence.start_position + static_cast<std::int32_t>(t));
      sequences_.push_back(&sequence);
    }
  }
  if (tokens_.empty()) fail("expected at least 1 token, got none");
}

}  // namespace aotllm
