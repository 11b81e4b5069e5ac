#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/model_runner.h"
#include "aotllm/request.h"
#include "aotllm/sampler.h"

namespace aotllm::testing {

inline std::uint64_t mix(std::uint64_t x) {  // the finalizer of SplitMix64
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

/// A prompt that begins with this token makes logits of NaN.
inline constexpr TokenId kNanToken = 1;

/// What a cache slot holds in place of K and V. The hash of a sequence is that of all its slots in order.
struct Slot {
  TokenId token = -1;
  std::int32_t position = -1;
};

inline std::uint64_t fold(std::uint64_t hash, const Slot& slot) {
  return mix(hash ^ (static_cast<std::uint64_t>(static_cast<std::uint32_t>(slot.token)) << 32 |
                     static_cast<std::uint32_t>(slot.position)));
}

/// The fake model: logits in [0, 8) from a hash of the sequence, NaN for the poisoned ones.
inline void fake_logits(std::uint64_t hash, TokenId first_token, std::span<float> row) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = first_token == kNanToken ? std::numeric_limits<float>::quiet_NaN()
                                      : static_cast<float>(mix(hash + i) >> 40) * 0x1.0p-21F;
  }
}

inline ModelShape small_shape() {
  return {.vocab_size = 37,
          .num_layers = 1,
          .max_seq_len = 48,
          .max_num_tokens = 32,
          .max_batch_size = 8,
          .tokens_per_block = 4,
          .kv_bytes_per_block = 64};
}

/// A runner that keeps tokens in its "KV blocks" and reads them back through the block tables: a block that is wrong,
/// stale, shared or at the wrong place gives other tokens than `expected_output`. It also refuses steps that break the
/// runner's contract.
class FakeRunner final : public ModelRunner {
 public:
  /// Called with the number of the step (from 0) before anything else; may block or throw.
  using Hook = std::function<void(std::int64_t step)>;

  explicit FakeRunner(const ModelShape& shape = small_shape(), Hook hook = {})
      : shape_(shape), hook_(std::move(hook)) {}

  const ModelShape& shape() const override { return shape_; }

  void allocate_kv(std::int32_t num_blocks) override {
    slots_.resize(static_cast<std::size_t>(num_blocks) * static_cast<std::size_t>(shape_.tokens_per_block));
  }

  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override {
    if (hook_) {
      hook_(num_steps_++);
    }
    check_contract(sequences);
    outputs.vocab_size = shape_.vocab_size;
    outputs.logits.clear();
    for (const SequenceStep& sequence : sequences) {
      for (std::size_t i = 0; i < sequence.tokens.size(); ++i) {
        const std::int32_t position = sequence.start_position + static_cast<std::int32_t>(i);
        slot(sequence, position) = {sequence.tokens[i], position};
      }
    }
    for (const SequenceStep& sequence : sequences) {
      if (sequence.logits == LogitsMode::kLast) {
        std::uint64_t hash = 0;
        const auto end = sequence.start_position + static_cast<std::int32_t>(sequence.tokens.size());
        for (std::int32_t position = 0; position < end; ++position) {
          hash = fold(hash, slot(sequence, position));
        }
        outputs.logits.resize(outputs.logits.size() + static_cast<std::size_t>(shape_.vocab_size));
        fake_logits(hash, slot(sequence, 0).token, outputs.row(outputs.rows() - 1));
      }
    }
  }

  void copy_block(BlockId, BlockId) override { throw std::logic_error("no block is shared yet"); }

 private:
  Slot& slot(const SequenceStep& sequence, std::int32_t position) {
    const BlockId block = sequence.block_table[static_cast<std::size_t>(position / shape_.tokens_per_block)];
    return slots_.at(static_cast<std::size_t>(block * shape_.tokens_per_block + position % shape_.tokens_per_block));
  }

  void check_contract(std::span<const SequenceStep> sequences) const {
    std::size_t total = 0;
    std::set<BlockId> blocks;
    for (const SequenceStep& sequence : sequences) {
      const std::size_t end = static_cast<std::size_t>(sequence.start_position) + sequence.tokens.size();
      total += sequence.tokens.size();
      require(!sequence.tokens.empty(), "a sequence without tokens");
      require(end < static_cast<std::size_t>(shape_.max_seq_len), "a sequence beyond max_seq_len");
      require(sequence.block_table.size() * static_cast<std::size_t>(shape_.tokens_per_block) >= end,
              "a block table that is too short");
      for (const BlockId block : sequence.block_table) {
        require(blocks.insert(block).second, "a block that two sequences hold");
      }
    }
    require(total >= 1 && total <= static_cast<std::size_t>(shape_.max_num_tokens), "too many tokens");
    require(sequences.size() <= static_cast<std::size_t>(shape_.max_batch_size), "too many sequences");
  }

  static void require(bool holds, const std::string& what) {
    if (!holds) {
      throw std::logic_error("the fake runner was given " + what);
    }
  }

  ModelShape shape_;
  Hook hook_;
  std::int64_t num_steps_ = 0;
  std::vector<Slot> slots_;
};

/// All that a request gives.
struct Output {
  std::vector<TokenId> tokens;
  FinishReason reason = FinishReason::kLength;
  friend bool operator==(const Output&, const Output&) = default;
};

/// What the fake model answers to `request` (with a seed, or greedy) when it has the machine to itself.
inline Output expected_output(const Request& request, const ModelShape& shape, std::int32_t max_seq_len,
                              const std::vector<TokenId>& eos_token_ids) {
  const SamplingParams& params = request.sampling;
  std::vector<TokenId> tokens = request.prompt_token_ids;
  const auto contains = [](const std::vector<TokenId>& ids, TokenId id) {
    return std::set(ids.begin(), ids.end()).contains(id);
  };
  Sampler sampler(shape.vocab_size);
  LogitsProcessors no_processors;
  std::vector<float> row(static_cast<std::size_t>(shape.vocab_size));
  Output output;
  while (true) {
    std::uint64_t hash = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      hash = fold(hash, {tokens[i], static_cast<std::int32_t>(i)});
    }
    fake_logits(hash, tokens[0], row);
    const TokenId token = sampler.sample(row, {.params = params,
                                               .processors = no_processors,
                                               .tokens = tokens,
                                               .seed = static_cast<std::uint64_t>(params.seed.value_or(0))});
    tokens.push_back(token);
    output.tokens.push_back(token);
    if (contains(params.stop_token_ids, token) || (!params.ignore_eos && contains(eos_token_ids, token))) {
      output.reason = FinishReason::kStop;
      return output;
    }
    if (output.tokens.size() == static_cast<std::size_t>(params.max_tokens) ||
        tokens.size() == static_cast<std::size_t>(max_seq_len)) {
      return output;
    }
  }
}

}  // namespace aotllm::testing
