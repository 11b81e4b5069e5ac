#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"
#include "runner/step_batch.h"

namespace aotllm {

struct OracleOptions {
  /// What the manager is told of the "engine". Blocks are accounted by `kv_groups`, though no memory is behind them.
  ModelShape shape;

  /// Tokens to choose from, all in [0, shape.vocab_size); empty = all.
  std::vector<TokenId> spoken_tokens;

  /// A step takes at least this long, asleep; ≥ 0.
  double step_seconds = 0.0;
};

/// A model that computes nothing, so that what is measured or soaked is all that is around a model: scheduler, KV
/// bookkeeping, sampler, responses, server.
///
/// Its next token is a function of the last one, its position and the adapter (`next_token`): whoever knows the prompt
/// knows the answer, whatever the batch, the chunks and the cache. The logits are 0 but for this token's, which is high
/// enough to be drawn at any temperature up to 2; constraints and penalties work as with any model. Steps that break
/// the contract of `ModelRunner::step` are refused as the CPU target refuses them.
class OracleRunner final : public ModelRunner {
 public:
  /// Throws Error(kInvalidRequest) with the field's name for an option out of range.
  explicit OracleRunner(OracleOptions options);

  /// What follows `token` at `position`:
  ///
  ///     x = (token · 2^32 + position) · 0x9E3779B97F4A7C15 + adapter · 0xD1B54A32D192ED03   (mod 2^64)
  ///     next = spoken_tokens[(x XOR x / 2^32) mod their number]
  TokenId next_token(TokenId token, std::int32_t position, AdapterId adapter = 0) const;

  /// One value of a token's hidden state, in [-1, 1): bits 40 to 63 of next_token's x for `token` + `index`.
  static float hidden_value(TokenId token, std::int32_t position, AdapterId adapter, std::int32_t index);

  const ModelShape& shape() const override { return options_.shape; }
  void allocate_kv(const KvAllocation& allocation) override;
  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override;
  void copy_blocks(std::span<const BlockCopy> copies) override;
  /// Fits any model.
  void load_adapter(AdapterId id, const Adapter& adapter) override;
  void unload_adapter(AdapterId id) override;

 private:
  OracleOptions options_;
  StepBatch batch_;  ///< checks steps
  KvAllocation kv_;
  std::set<AdapterId> adapters_;
};

}  // namespace aotllm
