#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"
#include "manager/sequence.h"

namespace aotllm {

/// What the runner gets of a step, packed, with whose it is. Its memory is reserved once and used again.
///
/// Tokens are copied: while the step runs, the background may read the sequences and nothing points into them but the
/// block tables, which stay as they are until the step has ended.
class StepInputs {
 public:
  struct Entry {
    Sequence* sequence = nullptr;
    std::int32_t num_tokens = 0;  ///< drafts included
    std::int32_t num_drafts = 0;
    bool is_context = false;
    bool samples = false;        ///< its last known token is in the step
    bool hidden = false;         ///< its rows are hidden states
    std::int32_t first_row = 0;  ///< of the logits, or of the hidden states
    std::int32_t num_rows = 0;
    std::int32_t mask = -1;   ///< its grammar mask; -1 = none
    std::int32_t token = -1;  ///< its place among the tokens that the runner draws; -1 = it has rows, or neither

    /// Rows that tokens are drawn from: the last one, and one for each draft.
    std::int32_t first_sampled_row() const { return first_row + num_rows - 1 - num_drafts; }
  };

  /// Where `runner_samples`, sequences that do not need logits get tokens in place of them.
  StepInputs(const SchedulerConfig& limits, std::int32_t vocab_size, bool runner_samples);

  void clear();

  /// Adds the next `num_tokens` tokens of `sequence` and `drafts` behind them, which are its last ones then.
  void add(Sequence& sequence, std::int32_t num_tokens, std::span<const TokenId> drafts, int num_groups);

  bool empty() const { return entries_.empty(); }
  std::span<const Entry> entries() const { return entries_; }
  std::span<const SequenceStep> steps() const { return steps_; }
  std::int32_t num_rows() const { return num_rows_; }
  std::int32_t num_hidden_rows() const { return num_hidden_rows_; }
  std::int32_t num_drawn_tokens() const { return num_drawn_tokens_; }
  std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens_.size()); }

  std::span<const TokenId> drafts(const Entry& entry) const;

  /// Grammar mask of an entry that has one: bit t allows token t.
  std::span<std::uint32_t> mask(const Entry& entry);

 private:
  std::size_t mask_words_;
  bool runner_samples_;
  std::vector<Entry> entries_;
  std::vector<SequenceStep> steps_;
  std::vector<TokenId> tokens_;  ///< reserved: steps_ point into it
  std::vector<std::uint32_t> masks_;
  std::int32_t num_rows_ = 0;
  std::int32_t num_hidden_rows_ = 0;
  std::int32_t num_drawn_tokens_ = 0;
  std::int32_t num_masks_ = 0;
};

}  // namespace aotllm
