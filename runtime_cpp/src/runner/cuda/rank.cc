#include "runner/cuda/rank.h"

#include <algorithm>
#include <utility>

#include "aotllm/errors.h"
#include "engine/plan.h"
#include "runner/cuda/padding.h"
#include "support/strings.h"

namespace aotllm::cuda {

void check_target(const Plan& plan) {
  if (plan.target == Target::kCuda) return;
  throw Error(ErrorKind::kEngineIncompatible, "the engine is for target cpu; build it with --target cuda");
}

void StepCheck::operator()(std::span<const SequenceStep> sequences, const BlockCounts& num_blocks) {
  batch_.assign(sequences, num_blocks);
  if (std::ssize(sequences) > max_batch_size_) {
    throw Error(ErrorKind::kInternal,
                cat("step: expected at most ", max_batch_size_, " sequences, got ", sequences.size()));
  }
  for (const SequenceStep& sequence : sequences) {
    if (sequence.adapter != 0) throw Error(ErrorKind::kInternal, "step: target cuda has no adapters");
    if (sequence.sampling) check_sampling(sequence);
  }
}

void StepCheck::check_sampling(const SequenceStep& sequence) const {
  const RowSampling& row = *sequence.sampling;
  const CountedText& text = sequence.text;
  const auto size = std::ssize(text.tokens);
  if (row.num_logprobs > support_.max_logprobs || sequence.penalties.slot >= support_.count_slots) {
    throw Error(ErrorKind::kInternal,
                cat("step: expected at most ", support_.max_logprobs, " log-probabilities and one of ",
                    support_.count_slots, " slots, got ", row.num_logprobs, " and slot ", sequence.penalties.slot));
  }
  if (row.mask >= 0 && sequence.masks == nullptr) {
    throw Error(ErrorKind::kInternal, cat("step: a row has mask ", row.mask, ", the step has no masks"));
  }
  if (text.num_counted < 0 || text.num_counted > size || text.num_prompt_tokens < 0 || text.num_prompt_tokens > size) {
    throw Error(ErrorKind::kInternal, cat("step: a text of ", size, " tokens, of which ", text.num_prompt_tokens,
                                          " are the prompt and ", text.num_counted, " are counted"));
  }
}

Rank::Rank(Engine engine, const CudaRunnerOptions& options, OwnedStream stream, std::unique_ptr<Communicator> ranks)
    : options_(options),
      engine_(std::move(engine)),
      ranks_(std::move(ranks)),
      weights_(engine_.plan()),
      program_(engine_.plan(), weights_, {options.deterministic, options.cublaslt, options.tactics}, ranks_.get()),
      stream_(std::move(stream)),
      data_(engine_.shape()),
      graphs_(ranks_.get()),
      sampler_(is_first() ? StepSampler(engine_.shape(), program_.head_rows()) : StepSampler()),
      rows_(is_first() ? static_cast<std::size_t>(program_.head_rows()) *
                             static_cast<std::size_t>(std::max(engine_.plan().vocab_size, engine_.plan().hidden_size))
                       : 0) {}

void Rank::select() const {
  check(cudaSetDevice(options_.device), "choice of the device");
}

void Rank::join(StageLink* before, StageLink* after) noexcept {
  before_ = before;
  after_ = after;
}

void Rank::allocate_kv(const KvAllocation& allocation) {
  if (kv_.allocation().device_blocks[0] != 0) throw Error(ErrorKind::kInternal, "allocate_kv: called a second time");
  kv_ = KvBlocks(engine_.plan().kv, allocation);
  program_.bind_kv(kv_);
}

/// Launches the step but for what is sampled late and for rows that go to the host.
void Rank::run(const StepShape& shape) {
  const StepView step = data_.view(shape);
  const auto layers = [&] { program_.run_layers(shape, step, sampled_tokens(), launches()); };
  const auto head = [&] { program_.run_head(shape, step, sampled_tokens(), launches()); };
  switch (options_.graphs ? graph_part(shape) : GraphPart::kNone) {
    case GraphPart::kNone:
      layers();
      head();
      break;
    case GraphPart::kLayers:
      graphs_.run(graph_key(shape), stream_.handle(), layers);
      if (shape.sampled == 0) break;
      settle();
      head();
      break;
    case GraphPart::kStep:
      graphs_.run(graph_key(shape), stream_.handle(), [&] {
        layers();
        head();
      });
      break;
  }
}

/// Head and final norm of the rows that go to the host, a chunk at a time. Other ranks take part in the head only.
void Rank::copy_rows(const StepShape& shape) {
  const std::int32_t* picked = data_.view(shape).host_rows;
  const auto vocab = static_cast<std::size_t>(engine_.plan().vocab_size);
  const auto hidden = static_cast<std::size_t>(engine_.plan().hidden_size);
  const auto in_chunks = [&](int total, auto&& chunk) {
    for (int begin = 0; begin < total; begin += program_.head_rows()) {
      const int count = std::min(total - begin, program_.head_rows());
      chunk(picked + begin, static_cast<std::size_t>(begin), count);
    }
    picked += total;
  };
  const auto fetch = [&](const void* from, std::size_t bytes, const char* what) {
    check(cudaMemcpyAsync(rows_.data(), from, bytes, cudaMemcpyDeviceToHost, stream_.handle()), what);
    check(cudaStreamSynchronize(stream_.handle()), "step");
  };
  in_chunks(data_.num_logit_rows(), [&](const std::int32_t* from, std::size_t begin, int count) {
    program_.head(from, count, launches());
    if (!is_first()) return;
    const std::size_t size = vocab * static_cast<std::size_t>(count);
    fetch(program_.logits(), size * sizeof(float), "copy of logits");
    std::copy_n(rows_.data(), size, host_rows_.logits.data() + begin * vocab);
  });
  if (!is_first()) return;
  in_chunks(data_.num_hidden_rows(), [&](const std::int32_t* from, std::size_t begin, int count) {
    program_.final_norm(from, count, launches());
    const std::size_t size = hidden * static_cast<std::size_t>(count);
    const auto* values = reinterpret_cast<const __nv_bfloat16*>(rows_.data());
    fetch(program_.hidden(), size * sizeof(__nv_bfloat16), "copy of hidden states");
    std::transform(values, values + size, host_rows_.hidden.data() + begin * hidden,
                   [](__nv_bfloat16 value) { return __bfloat162float(value); });
  });
}

/// A graph may still wait for another rank: no kernel may be loaded then on the device that both use.
void Rank::settle() const {
  if (ranks_ != nullptr && ranks_->shares_device()) check(cudaStreamSynchronize(stream_.handle()), "step");
}

void Rank::begin(std::span<const SequenceStep> sequences) {
  const Plan& plan = engine_.plan();
  const StepShape shape =
      padded_shape(data_.shape_of(sequences, options_.deterministic), engine_.shape(), program_.head_rows());
  data_.pack(sequences, shape);
  data_.upload(stream_.handle());
  if (before_ != nullptr) before_->receive(stream_.handle());
  run(shape);
  if (after_ != nullptr) after_->send(program_.leaving(), program_.stream_bytes(shape.rows), stream_.handle());
  turn_ ^= 1;
  Begun begun{is_first() ? StepSampler::needs_of(sequences) : StepSampler::Needs{}, turn_};
  if (is_first()) {
    if (shape.late) {
      settle();
      sampler_.sample(sequences, data_.view(shape), program_.logits(), launches(), program_.sampling_workspace());
    }
    sampler_.fetch(begun.needs, turn_, stream_.handle());
    const auto size = [](int rows, int width) {
      return static_cast<std::size_t>(rows) * static_cast<std::size_t>(width);
    };
    host_rows_.logits.resize(size(data_.num_logit_rows(), plan.vocab_size));
    host_rows_.hidden.resize(size(data_.num_hidden_rows(), plan.hidden_size));
  }
  if (shape.host_rows > 0 && plan.is_last_stage()) {
    settle();
    copy_rows(shape);
  }
  if (before_ != nullptr) before_->release(stream_.handle());
  check(cudaEventRecord(ends_[static_cast<std::size_t>(turn_)].handle(), stream_.handle()), "end of a step");
  begun_.push_back(begun);
}

void Rank::finish(StepOutputs& outputs) {
  if (begun_.empty()) throw Error(ErrorKind::kInternal, "finish: no step is under way");
  const Begun begun = begun_.front();
  check(cudaEventSynchronize(ends_[static_cast<std::size_t>(begun.turn)].handle()), "step");
  begun_.pop_front();
  if (!is_first()) return;
  outputs.vocab_size = engine_.plan().vocab_size;
  outputs.hidden_size = engine_.plan().hidden_size;
  std::swap(outputs.logits, host_rows_.logits);
  std::swap(outputs.hidden, host_rows_.hidden);
  sampler_.take(begun.needs, begun.turn, outputs);
}

void Rank::step(std::span<const SequenceStep> sequences, StepOutputs& outputs) {
  try {
    begin(sequences);
    finish(outputs);
  } catch (...) {
    begun_.clear();  // not waited for: other ranks may never come
    throw;
  }
}

void Rank::abandon() noexcept {
  cudaStreamSynchronize(stream_.handle());
  begun_.clear();
}

}  // namespace aotllm::cuda
