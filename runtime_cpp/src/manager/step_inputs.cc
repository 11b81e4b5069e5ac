#include "manager/step_inputs.h"

#include <algorithm>
#include <string>

#include "aotllm/errors.h"
#include "sampling/row_sampling.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// How the runner draws the token of `sequence` at `position`.
RowSampling row_sampling(const Sequence& sequence, std::size_t position) {
  RowSampling row = row_sampling(sequence.sampling);
  row.seed = sequence.seed;
  row.position = static_cast<std::uint32_t>(position);
  row.sequence_index = static_cast<std::uint32_t>(sequence.index);
  row.num_logprobs = sequence.num_logprobs;
  return row;
}

/// What its penalties are worked out from; the slot has counted all of it after this step.
void add_penalties(Sequence& sequence, SequenceStep& step) {
  const SamplingParams& params = sequence.sampling;
  step.penalties = {params.repetition_penalty, params.presence_penalty, params.frequency_penalty, sequence.count_slot};
  step.text = {sequence.tokens, sequence.num_prompt_tokens, sequence.num_counted};
  sequence.num_counted = static_cast<std::int32_t>(sequence.tokens.size());
}

}  // namespace

StepInputs::StepInputs(const SchedulerConfig& limits, std::int32_t vocab_size, const ModelRunner& runner,
                       CountSlots& slots)
    : mask_words_((static_cast<std::size_t>(vocab_size) + 31) / 32),
      runner_samples_(runner.samples()),
      support_(runner.sampling_support()),
      slots_(&slots),
      masks_(std::make_unique<Masks>()) {
  entries_.reserve(static_cast<std::size_t>(limits.max_batch_size));
  steps_.reserve(static_cast<std::size_t>(limits.max_batch_size));
  tokens_.reserve(static_cast<std::size_t>(limits.max_num_tokens));
}

void StepInputs::clear() {
  entries_.clear();
  steps_.clear();
  tokens_.clear();
  num_rows_ = 0;
  num_hidden_rows_ = 0;
  num_drawn_tokens_ = 0;
  num_drawn_logprobs_ = 0;
  num_masks_ = 0;
  masks_->clear();
}

/// The runner draws its token. One that has penalties holds a slot then.
bool StepInputs::is_drawn(Sequence& sequence, const Entry& entry) {
  return runner_samples_ && entry.samples && entry.num_drafts == 0 && !sequence.needs_logits(support_) &&
         (sequence.processors.penalties.empty() || slots_->hold(sequence));
}

void StepInputs::add(Sequence& sequence, std::int32_t num_tokens, std::span<const TokenId> drafts, int num_groups) {
  const auto start = static_cast<std::size_t>(sequence.num_computed);
  const auto known = std::span<const TokenId>(sequence.tokens).subspan(start, static_cast<std::size_t>(num_tokens));
  const std::size_t at = reserve(known.size() + drafts.size());
  tokens_.insert(tokens_.end(), known.begin(), known.end());
  tokens_.insert(tokens_.end(), drafts.begin(), drafts.end());

  Entry entry;
  entry.sequence = &sequence;
  entry.num_drafts = static_cast<std::int32_t>(drafts.size());
  entry.num_tokens = num_tokens + entry.num_drafts;
  entry.is_context = sequence.state != SequenceState::kGenerating;
  entry.samples = start + known.size() == sequence.tokens.size();
  const bool all_rows = entry.num_drafts > 0 || sequence.computes_in_full();
  entry.hidden = sequence.pools();
  const bool drawn = is_drawn(sequence, entry);
  entry.token = drawn ? num_drawn_tokens_++ : -1;
  entry.logprobs = drawn && sequence.num_logprobs >= 0 ? num_drawn_logprobs_++ : -1;
  std::int32_t& num_rows = entry.hidden ? num_hidden_rows_ : num_rows_;
  entry.first_row = num_rows;
  entry.num_rows = all_rows ? entry.num_tokens : (entry.samples && !drawn ? 1 : 0);
  const bool masked = drawn ? sequence.needs_mask() : entry.samples && sequence.constraint != nullptr;
  entry.mask = masked ? num_masks_++ : -1;
  num_rows += entry.num_rows;
  masks_->resize(static_cast<std::size_t>(num_masks_) * mask_words_);
  SequenceStep step = step_of(sequence, at, sequence.num_computed, num_groups);
  step.logits = all_rows ? LogitsMode::kAll : (entry.samples ? LogitsMode::kLast : LogitsMode::kNone);
  step.hidden = entry.hidden;
  if (drawn) {
    step.sampling = row_sampling(sequence, sequence.tokens.size());
    step.sampling->mask = entry.mask;
    step.masks = masked ? masks_.get() : nullptr;
    if (!sequence.processors.penalties.empty()) {
      add_penalties(sequence, step);
    }
  }
  entries_.push_back(entry);
  steps_.push_back(step);
}

void StepInputs::add_behind(Sequence& sequence, std::int32_t num_tokens, int num_groups) {
  const auto start = static_cast<std::size_t>(sequence.num_computed + sequence.num_scheduled);
  const bool is_fed = start >= sequence.tokens.size();
  const std::size_t count = is_fed ? 1 : static_cast<std::size_t>(num_tokens);
  const std::size_t at = reserve(count);
  if (is_fed) {
    tokens_.push_back(0);
  } else {
    const auto first = sequence.tokens.begin() + static_cast<std::ptrdiff_t>(start);
    tokens_.insert(tokens_.end(), first, first + num_tokens);
  }

  Entry entry;
  entry.sequence = &sequence;
  entry.num_tokens = static_cast<std::int32_t>(count);
  entry.is_context = !is_fed;
  entry.samples = is_fed || start + count == sequence.tokens.size();
  entry.token = entry.samples ? num_drawn_tokens_++ : -1;
  SequenceStep step = step_of(sequence, at, static_cast<std::int32_t>(start), num_groups);
  step.logits = entry.samples ? LogitsMode::kLast : LogitsMode::kNone;
  if (entry.samples) {
    step.sampling = row_sampling(sequence, start + count);
  }
  step.fed = is_fed ? sequence.drawn_token : -1;
  entries_.push_back(entry);
  steps_.push_back(step);
}

bool StepInputs::can_run_ahead() const {
  return num_rows_ == 0 && num_hidden_rows_ == 0 && std::ranges::all_of(entries_, [](const Entry& entry) {
           return entry.sequence == nullptr || entry.sequence->can_run_ahead();
         });
}

void StepInputs::schedule() const {
  for (const Entry& entry : entries_) {
    if (entry.sequence != nullptr) {
      entry.sequence->num_scheduled = entry.num_tokens;
      entry.sequence->num_scheduled_drafts = entry.num_drafts;
      entry.sequence->drawn_token = entry.token;
    }
  }
}

void StepInputs::drop(const Sequence& sequence) {
  const auto same = [&](const Entry& entry) { return entry.sequence == &sequence; };
  const auto found = std::ranges::find_if(entries_, same);
  if (found != entries_.end()) {
    found->sequence = nullptr;
  }
}

/// Where the next `count` tokens go. Steps point to them: there is no more memory than the limits ask for.
std::size_t StepInputs::reserve(std::size_t count) {
  if (tokens_.size() + count > tokens_.capacity()) {
    throw Error(ErrorKind::kInternal, cat("a step of more than ", tokens_.capacity(), " tokens"));
  }
  return tokens_.size();
}

/// What the runner gets of a sequence whose tokens from `start` on are those from `at` on.
SequenceStep StepInputs::step_of(const Sequence& sequence, std::size_t at, std::int32_t start, int num_groups) const {
  SequenceStep step;
  step.tokens = std::span<const TokenId>(tokens_).subspan(at);
  step.start_position = start;
  for (int group = 0; group < num_groups; ++group) {
    step.block_tables[static_cast<std::size_t>(group)] = sequence.table.blocks(group);
  }
  step.adapter = sequence.adapter;
  return step;
}

std::span<const TokenId> StepInputs::drafts(const Entry& entry) const {
  const auto index = static_cast<std::size_t>(&entry - entries_.data());
  return steps_[index].tokens.last(static_cast<std::size_t>(entry.num_drafts));
}

std::span<std::uint32_t> StepInputs::mask(const Entry& entry) {
  if (entry.mask < 0) {
    return {};
  }
  return std::span(masks_->words).subspan(static_cast<std::size_t>(entry.mask) * mask_words_, mask_words_);
}

void StepInputs::fill_mask(const Entry& entry) {
  const Sequence& sequence = *entry.sequence;
  if (sequence.constraint != nullptr) {
    sequence.constraint->fill_mask(mask(entry));
  } else {
    std::ranges::fill(mask(entry), ~std::uint32_t{0});
  }
  if (entry.token >= 0) {
    for (const auto& processor : sequence.processors.constraints) {
      processor->forbid(mask(entry), sequence.tokens, sequence.num_prompt_tokens);
    }
  }
}

}  // namespace aotllm
