#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "aotllm/model_runner.h"

namespace aotllm {

/// How the tokens of one request are chosen, and when it stops.
///
/// Order: what is allowed at all (allowed_token_ids, bad_words, no_repeat_ngram_size, min_tokens, logit_bias),
/// penalties, temperature, then the filters min_p, top_k, top_p, typical_p, each on what the one before has left.
/// "Text" below is the prompt and what was generated so far.
struct SamplingParams {
  /// Most tokens to generate; ≥ 1. The engine's context length may end the request sooner.
  std::int32_t max_tokens = 16;

  /// Divides the logits; in [0, 2]. 0 = greedy: the most likely token, the lowest id among equals.
  double temperature = 1.0;

  /// Keeps the k most likely tokens; 0 or -1 = all.
  std::int32_t top_k = 0;

  /// Keeps the smallest set of most likely tokens whose probabilities sum to at least top_p; in (0, 1], 1 = all.
  double top_p = 1.0;

  /// Keeps tokens at least min_p times as likely as the most likely one; in [0, 1], 0 = all.
  double min_p = 0.0;

  /// Keeps the smallest set of tokens with at least this probability whose information content is nearest to the
  /// distribution's entropy; in (0, 1], 1 = all. Meister, Pimentel, Wiher, Cotterell: "Locally Typical Sampling", TACL
  /// 2023, section 5.
  double typical_p = 1.0;

  /// Divides the positive logits of the tokens of the text, and multiplies the negative ones; finite and > 0, 1 = off.
  /// Keskar et al.: "CTRL: A Conditional Transformer Language Model for Controllable Generation", 2019, section 4.1.
  double repetition_penalty = 1.0;

  /// Taken from the logits of the tokens that were generated (the prompt's do not count); in [-2, 2], 0 = off.
  double presence_penalty = 0.0;

  /// As presence_penalty, times how often the token was generated; in [-2, 2], 0 = off.
  double frequency_penalty = 0.0;

  /// No sequence of this many tokens comes twice in the text; ≥ 1, or 0 = off.
  std::int32_t no_repeat_ngram_size = 0;

  /// Added to the logits, by token; each in [-100, 100].
  std::map<TokenId, double> logit_bias;

  /// The only tokens that may be generated; empty = all.
  std::vector<TokenId> allowed_token_ids;

  /// Sequences of tokens, none of them empty, that the text must not go on to complete.
  std::vector<std::vector<TokenId>> bad_words;

  /// EOS tokens and stop_token_ids are not generated before this many tokens were; in [0, max_tokens].
  std::int32_t min_tokens = 0;

  /// Makes draws reproducible, whatever else runs. Absent = a random seed, drawn once at submit.
  std::optional<std::int64_t> seed;

  /// Tokens that end the request, beside the engine's EOS tokens.
  std::vector<TokenId> stop_token_ids;

  /// EOS tokens do not end the request (stop_token_ids still do).
  bool ignore_eos = false;
};

/// Checks every range above; `vocab_size` bounds the token ids. Throws Error(kInvalidRequest) whose param() is the
/// name of the first field that is out of range.
void validate(const SamplingParams& params, std::int32_t vocab_size);

}  // namespace aotllm
