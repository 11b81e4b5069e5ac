#include "manager/step_inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// How the runner draws the next token of `sequence`. What is on in double precision stays on when it is rounded.
RowSampling row_sampling(const Sequence& sequence) {
  const SamplingParams& params = sequence.sampling;
  RowSampling row;
  row.temperature = static_cast<float>(params.temperature);
  if (params.temperature > 0.0) {
    row.temperature = std::max(row.temperature, std::numeric_limits<float>::min());
  }
  row.top_k = params.top_k;
  row.top_p = static_cast<float>(params.top_p);
  if (params.top_p < 1.0) {
    row.top_p = std::min(row.top_p, std::nextafter(1.0F, 0.0F));
  }
  row.min_p = static_cast<float>(params.min_p);
  row.seed = sequence.seed;
  row.position = static_cast<std::uint32_t>(sequence.tokens.size());
  row.sequence_index = static_cast<std::uint32_t>(sequence.index);
  return row;
}

}  // namespace

StepInputs::StepInputs(const SchedulerConfig& limits, std::int32_t vocab_size, bool runner_samples)
    : mask_words_((static_cast<std::size_t>(vocab_size) + 31) / 32), runner_samples_(runner_samples) {
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
  num_masks_ = 0;
}

void StepInputs::add(Sequence& sequence, std::int32_t num_tokens, std::span<const TokenId> drafts, int num_groups) {
  if (tokens_.size() + static_cast<std::size_t>(num_tokens) + drafts.size() > tokens_.capacity()) {
    throw Error(ErrorKind::kInternal, cat("a step of more than ", tokens_.capacity(), " tokens"));
  }
  const auto start = static_cast<std::size_t>(sequence.num_computed);
  const auto known = std::span<const TokenId>(sequence.tokens).subspan(start, static_cast<std::size_t>(num_tokens));
  const std::size_t at = tokens_.size();
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
  const bool drawn = runner_samples_ && entry.samples && entry.num_drafts == 0 && !sequence.needs_logits();
  entry.token = drawn ? num_drawn_tokens_++ : -1;
  std::int32_t& num_rows = entry.hidden ? num_hidden_rows_ : num_rows_;
  entry.first_row = num_rows;
  entry.num_rows = all_rows ? entry.num_tokens : (entry.samples && !drawn ? 1 : 0);
  entry.mask = entry.samples && sequence.constraint != nullptr ? num_masks_++ : -1;
  num_rows += entry.num_rows;
  if (static_cast<std::size_t>(num_masks_) * mask_words_ > masks_.size()) {
    masks_.resize(static_cast<std::size_t>(num_masks_) * mask_words_);
  }

  SequenceStep step;
  step.tokens = std::span<const TokenId>(tokens_).subspan(at);
  step.start_position = sequence.num_computed;
  for (int group = 0; group < num_groups; ++group) {
    step.block_tables[static_cast<std::size_t>(group)] = sequence.table.blocks(group);
  }
  step.logits = all_rows ? LogitsMode::kAll : (entry.samples ? LogitsMode::kLast : LogitsMode::kNone);
  step.hidden = entry.hidden;
  step.adapter = sequence.adapter;
  if (drawn) {
    step.sampling = row_sampling(sequence);
  }
  entries_.push_back(entry);
  steps_.push_back(step);
}

std::span<const TokenId> StepInputs::drafts(const Entry& entry) const {
  const auto index = static_cast<std::size_t>(&entry - entries_.data());
  return steps_[index].tokens.last(static_cast<std::size_t>(entry.num_drafts));
}

std::span<std::uint32_t> StepInputs::mask(const Entry& entry) {
  if (entry.mask < 0) {
    return {};
  }
  return std::span(masks_).subspan(static_cast<std::size_t>(entry.mask) * mask_words_, mask_words_);
}

}  // namespace aotllm
