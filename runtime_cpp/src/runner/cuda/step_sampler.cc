#include "runner/cuda/step_sampler.h"

#include <algorithm>

#include "aotllm/errors.h"
#include "elementwise/mapped_copy.h"
#include "sampling/sampling.h"
#include "support/strings.h"

namespace aotllm::cuda {
namespace {

std::size_t mask_words(const ModelShape& shape) {
  return (static_cast<std::size_t>(shape.vocab_size) + 31) / 32;
}

std::size_t product(std::size_t a, std::int32_t b) {
  return a * static_cast<std::size_t>(b);
}

}  // namespace

bool StepSampler::samples(const ModelShape& shape) {
  return shape.vocab_size <= kMaxSampledVocab;
}

SamplingSupport StepSampler::support(const ModelShape& shape) {
  if (!samples(shape)) return {};
  return {true, TokenCounter::num_slots(shape.max_batch_size, shape.vocab_size), kMaxTopLogprobs};
}

StepSampler::StepSampler(const ModelShape& shape, int max_rows)
    : shape_(shape),
      counter_(support(shape).count_slots, shape.vocab_size),
      max_rows_(max_rows),
      drawn_(static_cast<std::size_t>(max_rows)),
      tokens_(2 * drawn_.size()),
      masks_(product(mask_words(shape), max_rows)),
      on_device_(masks_.size()),
      logprobs_(drawn_.size()),
      top_ids_(product(drawn_.size(), kMaxTopLogprobs)),
      top_logprobs_(top_ids_.size()) {}

StepSampler::Needs StepSampler::needs_of(std::span<const SequenceStep> sequences) {
  Needs needs;
  for (const SequenceStep& sequence : sequences) {
    if (!sequence.is_sampled()) continue;
    const RowSampling& row = *sequence.sampling;
    const bool is_penalized = sequence.penalties.slot >= 0;
    ++needs.rows;
    needs.greedy = needs.greedy && row.temperature == 0.0F && row.mask < 0 && !is_penalized;
    needs.penalties = needs.penalties || is_penalized;
    if (row.mask >= 0) needs.masks = sequence.masks;
    needs.logprobs += row.num_logprobs >= 0 ? 1 : 0;
    needs.num_top = std::max(needs.num_top, row.num_logprobs);
  }
  return needs;
}

void StepSampler::sample(std::span<const SequenceStep> sequences, const StepView& step, const float* logits,
                         const Stream& stream, std::span<std::uint8_t> workspace) {
  const Needs needs = needs_of(sequences);
  SamplingArgs args;
  args.logits = logits;
  args.vocab_size = shape_.vocab_size;
  args.num_rows = needs.rows;
  args.params = step.sampling;
  args.tokens = drawn_.data();
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.size();
  if (needs.penalties) {
    counter_.follow(sequences, stream);
    args.penalties = step.penalties;
    args.counts = counter_.counts();
  }
  if (needs.masks != nullptr) {
    upload(*needs.masks, stream.handle);
    args.masks = on_device_.data();
  }
  if (needs.greedy) {
    sample_greedy(args, stream);
  } else {
    cuda::sample(args, stream);
  }
  if (needs.logprobs == 0) return;
  RowLogprobsArgs list;
  list.logits = logits;
  list.vocab_size = shape_.vocab_size;
  list.num_rows = needs.logprobs;
  list.rows = step.logprob_rows;
  list.tokens = args.tokens;
  list.num_top = needs.num_top;
  list.workspace = workspace.data();
  list.workspace_bytes = workspace.size();
  list.logprobs = logprobs_.device();
  list.top_ids = top_ids_.device();
  list.top_logprobs = top_logprobs_.device();
  row_logprobs(list, stream);
}

/// Each part as soon as it is made: making, copying and sending of many masks overlap.
void StepSampler::upload(StepMasks& masks, cudaStream_t stream) {
  if (masks.size() > masks_.size() || masks.size() % mask_words(shape_) != 0) {
    throw Error(ErrorKind::kInternal, cat("step: expected up to ", masks_.size(), " words of masks, ",
                                          mask_words(shape_), " for each, got ", masks.size()));
  }
  for (std::size_t sent = 0; sent < masks.size();) {
    const std::span<const std::uint32_t> part = masks.wait(sent).subspan(sent);
    std::ranges::copy(part, masks_.data() + sent);
    check(cudaMemcpyAsync(on_device_.data() + sent, masks_.data() + sent, part.size_bytes(), cudaMemcpyHostToDevice,
                          stream),
          "copy of masks");
    sent += part.size();
  }
}

void StepSampler::fetch(const Needs& needs, int turn, cudaStream_t stream) {
  if (needs.rows == 0) return;
  copy_mapped(tokens_.device() + turn * max_rows_, drawn_.data(),
              sizeof(std::int32_t) * static_cast<std::size_t>(needs.rows), stream);
}

void StepSampler::take(const Needs& needs, int turn, StepOutputs& outputs) const {
  const std::int32_t* tokens = tokens_.data() + turn * max_rows_;
  outputs.tokens.assign(tokens, tokens + needs.rows);
  DrawnLogprobs& drawn = outputs.drawn_logprobs;
  const auto rows = static_cast<std::size_t>(needs.logprobs);
  const std::size_t listed = product(rows, needs.num_top);
  drawn.num_top = needs.num_top;
  drawn.logprobs.assign(logprobs_.data(), logprobs_.data() + rows);
  drawn.top_ids.assign(top_ids_.data(), top_ids_.data() + listed);
  drawn.top_logprobs.assign(top_logprobs_.data(), top_logprobs_.data() + listed);
}

}  // namespace aotllm::cuda
