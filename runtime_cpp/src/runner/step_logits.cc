#include "runner/step_logits.h"

#include <algorithm>

namespace aotllm {
StepLogits::StepLogits(const ModelShape& shape, int num_threads)
    : vocab_size_(shape.vocab_size), num_threads_(num_threads), samplers_(static_cast<std::size_t>(num_threads)) {
  rows_.reserve(static_cast<std::size_t>(shape.max_num_tokens));
  best_.reserve(static_cast<std::size_t>(num_threads) * static_cast<std::size_t>(shape.max_batch_size));
}

void StepLogits::assign(std::span<const SequenceStep> sequences, StepOutputs& outputs) {
  const auto width = static_cast<std::size_t>(vocab_size_);
  rows_.clear();
  num_drawn_ = 0;
  std::size_t num_given = 0;
  for (const SequenceStep& sequence : sequences) {
    if (sequence.hidden) continue;
    const bool sampled = sequence.is_sampled();
    const std::size_t count = sequence.num_output_rows();
    rows_.insert(rows_.end(), count, Row{nullptr, sampled ? &sequence : nullptr, kNothingAllowed});
    if (!sampled) num_given += count;
    if (sampled && sequence.sampling->temperature > 0.0F) ++num_drawn_;
  }
  outputs.vocab_size = vocab_size_;
  outputs.logits.resize(num_given * width);
  const std::size_t bytes = static_cast<std::size_t>(num_drawn_) * width * sizeof(float);
  if (bytes > drawn_from_.size()) drawn_from_ = PageBuffer(bytes);

  float* given = outputs.logits.data();
  auto* drawn = reinterpret_cast<float*>(drawn_from_.data());
  for (Row& row : rows_) {
    if (row.sampled != nullptr && row.sampled->sampling->temperature <= 0.0F) continue;
    float*& next = row.sampled == nullptr ? given : drawn;
    row.to = next;
    next += width;
  }
  best_.assign(static_cast<std::size_t>(num_threads_) * rows_.size(), BestToken{});
}

void StepLogits::take(int thread, int row, TokenId first, std::span<const float> logits) {
  float* to = rows_[static_cast<std::size_t>(row)].to;
  if (to != nullptr) {
    std::ranges::copy(logits, to + first);
  } else {
    best(thread, static_cast<std::size_t>(row)).take(logits, first);
  }
}

void StepLogits::draw(int thread, int num_threads) {
  int index = 0;  // among the rows that are drawn
  for (Row& row : rows_) {
    if (row.sampled == nullptr || row.to == nullptr || index++ % num_threads != thread) continue;
    std::optional<Sampler>& sampler = samplers_[static_cast<std::size_t>(thread)];
    if (!sampler) sampler.emplace(vocab_size_);
    row.token = sampler->choose({row.to, static_cast<std::size_t>(vocab_size_)}, *row.sampled->sampling);
  }
}

void StepLogits::finish(StepOutputs& outputs) const {
  outputs.tokens.clear();
  for (std::size_t row = 0; row < rows_.size(); ++row) {
    if (rows_[row].sampled == nullptr) continue;
    BestToken best;
    for (std::size_t at = row; at < best_.size(); at += rows_.size()) best.take(best_[at]);
    outputs.tokens.push_back(rows_[row].to != nullptr ? rows_[row].token : best.token());
  }
}

}  // namespace aotllm
