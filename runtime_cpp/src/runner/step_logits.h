#pragma once

#include <optional>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"
#include "aotllm/sampler.h"
#include "sampling/best_token.h"
#include "support/page_buffer.h"

namespace aotllm {

/// Where the logits of a step go, row by row: to the host; for rows that the runner samples, to where a thread draws
/// the token from them; and no further than their maximum where that is all a row asks for.
class StepLogits {
 public:
  StepLogits(const ModelShape& shape, int num_threads);

  /// Before the step: what its rows ask for. `sequences` stay until `finish`.
  void assign(std::span<const SequenceStep> sequences, StepOutputs& outputs);

  /// By a thread: the logits of tokens first, first + 1, … of logit row `row`. Each token of a row comes once.
  void take(int thread, int row, TokenId first, std::span<const float> logits);

  /// Rows wait to be drawn: `draw` has to be called by all threads of the step once all of the logits are there.
  bool waits() const noexcept { return num_drawn_ > 0; }
  /// The share of a thread, of `num_threads`.
  void draw(int thread, int num_threads);

  /// After the step: the tokens of the rows that are sampled, in order.
  void finish(StepOutputs& outputs) const;

 private:
  struct Row {
    float* to = nullptr;                    ///< [vocab_size]; null = the maximum suffices
    const SequenceStep* sampled = nullptr;  ///< whose row it is; null = the host's
    TokenId token = kNothingAllowed;        ///< drawn
  };

  BestToken& best(int thread, std::size_t row) noexcept {
    return best_[static_cast<std::size_t>(thread) * rows_.size() + row];
  }

  std::int32_t vocab_size_;
  int num_threads_;
  std::vector<Row> rows_;
  std::vector<BestToken> best_;                   ///< [threads, rows]
  std::vector<std::optional<Sampler>> samplers_;  ///< of threads that have drawn
  PageBuffer drawn_from_;                         ///< [drawn rows, vocab_size], as many as there were at most
  int num_drawn_ = 0;
};

}  // namespace aotllm
