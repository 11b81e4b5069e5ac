#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"
#include "manager/count_slots.h"
#include "manager/sequence.h"

namespace aotllm {

/// What the runner gets of a step, packed, with whose it is. Its memory is reserved once and used again.
///
/// Tokens are copied: while the step runs, the background may read the sequences and nothing points into them but the
/// block tables, which stay as they are until the step has ended.
class StepInputs {
 public:
  struct Entry {
    Sequence* sequence = nullptr;  ///< null = it has ended since
    std::int32_t num_tokens = 0;   ///< drafts included
    std::int32_t num_drafts = 0;
    bool is_context = false;
    bool samples = false;        ///< its last known token is in the step
    bool hidden = false;         ///< its rows are hidden states
    std::int32_t first_row = 0;  ///< of the logits, or of the hidden states
    std::int32_t num_rows = 0;
    std::int32_t mask = -1;      ///< its mask; -1 = none
    std::int32_t token = -1;     ///< its place among the tokens that the runner draws; -1 = it has rows, or neither
    std::int32_t logprobs = -1;  ///< its place among those whose log-probabilities the runner gives; -1 = none

    /// Rows that tokens are drawn from: the last one, and one for each draft.
    std::int32_t first_sampled_row() const { return first_row + num_rows - 1 - num_drafts; }
  };

  /// Sequences whose tokens `runner` can draw get these in place of logits; those that have penalties hold one of
  /// `slots` then, which outlives this.
  StepInputs(const SchedulerConfig& limits, std::int32_t vocab_size, const ModelRunner& runner, CountSlots& slots);

  void clear();

  /// Adds the next `num_tokens` tokens of `sequence` and `drafts` behind them, which are its last ones then.
  void add(Sequence& sequence, std::int32_t num_tokens, std::span<const TokenId> drafts, int num_groups);

  /// Adds the next tokens of `sequence` as the step in hand, which is under way, will leave it: `num_tokens` known
  /// ones, or, where it has no more, the one that is drawn for it. For sequences that can_run_ahead().
  void add_behind(Sequence& sequence, std::int32_t num_tokens, int num_groups);

  /// Every token that the step gives is drawn by the runner, and the next one may be computed before it is known.
  bool can_run_ahead() const;

  /// Notes in the sequences what this step, which is in hand now, does for them.
  void schedule() const;

  /// A sequence that ends while its step is under way: nothing will come of its entry.
  void drop(const Sequence& sequence);

  bool empty() const { return entries_.empty(); }
  std::span<const Entry> entries() const { return entries_; }
  std::span<const SequenceStep> steps() const { return steps_; }
  std::int32_t num_rows() const { return num_rows_; }
  std::int32_t num_hidden_rows() const { return num_hidden_rows_; }
  std::int32_t num_drawn_tokens() const { return num_drawn_tokens_; }
  std::int32_t num_drawn_logprobs() const { return num_drawn_logprobs_; }
  std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens_.size()); }

  std::span<const TokenId> drafts(const Entry& entry) const;

  /// Mask of an entry that has one: bit t allows token t. For a row that the host draws from, it is the grammar's; else
  /// it holds all that forbids tokens.
  std::span<std::uint32_t> mask(const Entry& entry);

  /// Makes the masks, beside the step. Those who wait for them go on. `on_failure` hears of grammars that fail.
  template <class OnFailure>
  void fill_masks(OnFailure&& on_failure);

 private:
  /// Masks of the step, at a place that stays.
  class Masks final : public StepMasks {
   public:
    std::size_t size() const override { return size_; }
    std::span<const std::uint32_t> wait(std::size_t seen) override {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return filled_ > seen; });
      return std::span(words).first(filled_);
    }
    void clear() {
      const std::lock_guard lock(mutex_);
      size_ = 0;
      filled_ = 0;
    }
    /// What they hold until they are filled means nothing.
    void resize(std::size_t num_words) {
      size_ = num_words;
      words.resize(std::max(words.size(), size_));
    }
    /// The first `num_words` are made.
    void set_filled(std::size_t num_words) {
      const std::lock_guard lock(mutex_);
      filled_ = num_words;
      changed_.notify_all();
    }

    std::vector<std::uint32_t> words;  ///< [masks, mask_words] and more: it does not shrink

   private:
    std::size_t size_ = 0;
    std::mutex mutex_;  ///< of filled_
    std::condition_variable changed_;
    std::size_t filled_ = 0;
  };

  bool is_drawn(Sequence& sequence, const Entry& entry);
  void fill_mask(const Entry& entry);
  std::size_t reserve(std::size_t count);
  SequenceStep step_of(const Sequence& sequence, std::size_t at, std::int32_t start, int num_groups) const;

  std::size_t mask_words_;
  bool runner_samples_;
  SamplingSupport support_;
  CountSlots* slots_;
  std::vector<Entry> entries_;
  std::vector<SequenceStep> steps_;
  std::vector<TokenId> tokens_;  ///< reserved: steps_ point into it
  std::unique_ptr<Masks> masks_;
  std::int32_t num_rows_ = 0;
  std::int32_t num_hidden_rows_ = 0;
  std::int32_t num_drawn_tokens_ = 0;
  std::int32_t num_drawn_logprobs_ = 0;
  std::int32_t num_masks_ = 0;
};

template <class OnFailure>
void StepInputs::fill_masks(OnFailure&& on_failure) {
  constexpr std::size_t kTogether = 65536;  // words that are worth a notice
  std::size_t noticed = 0;
  for (const Entry& entry : entries_) {
    if (entry.mask < 0) {
      continue;
    }
    try {
      fill_mask(entry);
    } catch (const std::exception& e) {
      on_failure(entry.sequence->id, e.what());
    }
    const std::size_t made = static_cast<std::size_t>(entry.mask + 1) * mask_words_;  // masks come in order of entries
    if (made - noticed >= kTogether || made == masks_->size()) {
      masks_->set_filled(noticed = made);
    }
  }
}

}  // namespace aotllm
