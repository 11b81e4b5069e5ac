#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "aotllm/request.h"

namespace aotllm {

/// What a processor is to a runner that samples: see SamplingSupport.
enum class ProcessorForm : std::uint8_t {
  kLogits,     ///< anything: the host must have the logits
  kBan,        ///< it forbids tokens and does no more, so that a mask says all
  kPenalties,  ///< RowPenalties with those of SamplingParams
};

/// Changes logits before a token is drawn. -inf forbids a token; NaN and +inf are faults.
class LogitsProcessor {
 public:
  virtual ~LogitsProcessor() = default;

  virtual ProcessorForm form() const { return ProcessorForm::kLogits; }

  /// It does nothing for this text, so that no mask need be made.
  virtual bool idle(std::span<const TokenId> /*tokens*/, std::int32_t /*num_prompt_tokens*/) const { return false; }

  /// Of form kBan: takes the tokens that `apply` forbids out of `mask` (bit t % 32 of word t / 32 allows token t).
  virtual void forbid(std::span<std::uint32_t> /*mask*/, std::span<const TokenId> /*tokens*/,
                      std::int32_t /*num_prompt_tokens*/) {}

  /// `logits` [vocab_size] are those of the token after `tokens` (prompt and generated so far); `num_prompt_tokens` of
  /// them are the prompt. What it does is a function of these arguments: it may remember the text of an earlier call to
  /// save work, but has to be right whatever texts it was asked about before. An exception ends this request only.
  virtual void apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) = 0;
};

/// The processors of one request, in their two stages.
struct LogitsProcessors {
  /// What is allowed at all: bans, min_tokens, logit bias.
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
  /// Tokens that a grammar allows: bit t % 32 of word t / 32; [⌈vocab_size / 32⌉], or empty = all. A constraint too.
  std::span<const std::uint32_t> mask = {};
};

/// Chooses tokens: constraints and mask → penalties → temperature → min_p → top_k → top_p → typical_p → draw.
///
/// A draw depends on the logits, params, seed, position and sequence index only: not on the batch, nor on draws before.
/// Keeps scratch memory from call to call; not thread-safe.
class Sampler {
 public:
  explicit Sampler(std::int32_t vocab_size);

  /// The token after `context.tokens`. `logits` [vocab_size] stay as they are. Throws Error(kInternal) where a logit is
  /// NaN or +inf or all are -inf, Error(kInvalidRequest) where mask and processors leave no token; passes on what a
  /// processor throws.
  TokenId sample(std::span<const float> logits, const SamplingContext& context);

  /// The token that `sample` gives where there are no processors and no mask; kDamagedRow or kNothingAllowed where it
  /// throws.
  TokenId choose(std::span<const float> logits, const RowSampling& row, double typical_p = 1.0);

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
  std::span<const float> process(std::span<const float> logits, const SamplingContext& context);
  void collect_candidates(std::span<const float> logits, float max_logit, const RowSampling& row);
  void collect_top_k(std::span<const float> logits, float max_logit, const RowSampling& row);
  void keep_top_k(std::int32_t k);
  void keep_top_p(double top_p);
  void keep_typical(double typical_p);
  template <typename Before>
  void keep_mass(double mass, Before before);
  TokenId draw(double uniform) const;

  std::vector<float> processed_;       ///< [vocab_size], only where processors or a mask are
  std::vector<Candidate> candidates_;  ///< tokens that the filters have left
};

}  // namespace aotllm
