#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "aotllm/request.h"

namespace aotllm {

/// Changes logits before a token is drawn. -inf forbids a token; NaN and +inf are faults.
class LogitsProcessor {
 public:
  virtual ~LogitsProcessor() = default;

  /// `logits` [vocab_size] are those of the token after `tokens` (prompt and generated so far); `num_prompt_tokens` of
  /// them are the prompt. An exception ends this request only.
  virtual void apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) = 0;
};

/// The processors of one request, in their two stages.
struct LogitsProcessors {
  /// What is allowed at all: bans, min_tokens, logit bias, grammar masks.
  std::vector<std::unique_ptr<LogitsProcessor>> constraints;
  /// Penalties on what was said before.
  std::vector<std::unique_ptr<LogitsProcessor>> penalties;

  bool empty() const { return constraints.empty() && penalties.empty(); }
};

/// What a token is sampled from, beside its logits.
struct SamplingContext {
  const SamplingParams& params;
  LogitsProcessors& processors;
  std::span<const TokenId> tokens;     ///< prompt and generated so far; the draw's position is their number
  std::int32_t num_prompt_tokens = 0;  ///< of those
  std::uint64_t seed = 0;
  std::uint32_t sequence_index = 0;  ///< tells the sequences of one request apart
};

/// Chooses tokens: processors → temperature → min_p → top_k → top_p → draw.
///
/// A draw depends on the logits, params, seed, position and sequence index only: not on the batch, nor on draws before.
/// Keeps scratch memory from call to call; not thread-safe.
class Sampler {
 public:
  explicit Sampler(std::int32_t vocab_size);

  /// The token after `context.tokens`. `logits` [vocab_size] stay as they are. Throws Error(kInternal) where a logit is
  /// NaN or +inf, or no token is allowed; passes on what a processor throws.
  TokenId sample(std::span<const float> logits, const SamplingContext& context);

  /// Log-probabilities of `token` and of the `num_top` (≤ vocab_size) most likely tokens under softmax(logits), the
  /// normalizer summed in double precision.
  TokenLogprobs logprobs(std::span<const float> logits, TokenId token, std::int32_t num_top);

 private:
  struct Candidate {
    float logit;
    TokenId id;
    double weight;  ///< probability up to a common factor
  };

  static bool more_likely(const Candidate& a, const Candidate& b);
  void collect_candidates(std::span<const float> logits, float max_logit, const SamplingParams& params);
  void keep_top_k(std::int32_t k);
  void keep_top_p(double top_p);
  TokenId draw(double uniform) const;

  std::vector<float> processed_;       ///< [vocab_size], only where processors are
  std::vector<Candidate> candidates_;  ///< tokens that the filters have left
};

}  // namespace aotllm
