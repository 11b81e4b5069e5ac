#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/model_runner.h"
#include "aotllm/sampler.h"
#include "fake_model.h"
#include "sampling/processors.h"

namespace aotllm::testing {

/// A runner that keeps tokens in its "KV blocks" and reads them back through the block tables: a block that is wrong,
/// stale, shared or at the wrong place gives other tokens than `expected_output`. It also refuses steps that break the
/// runner's contract.
class FakeRunner : public ModelRunner {
 public:
  /// Called with the number of the step (from 0) before anything else; may block or throw.
  using Hook = std::function<void(std::int64_t step)>;

  explicit FakeRunner(const ModelShape& shape = small_shape(), Hook hook = {})
      : shape_(shape), hook_(std::move(hook)), sampler_(shape.vocab_size) {}

  const ModelShape& shape() const override { return shape_; }

  void allocate_kv(const KvAllocation& allocation) override {
    for (std::size_t group = 0; group < shape_.kv_groups.size(); ++group) {
      const auto slots_of = [this](std::int32_t blocks) {
        return static_cast<std::size_t>(blocks) * static_cast<std::size_t>(shape_.tokens_per_block);
      };
      device_[group].resize(slots_of(allocation.device_blocks[group]));
      host_[group].resize(slots_of(allocation.host_blocks[group]));
    }
  }

  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override {
    if (hook_) {
      hook_(num_steps_++);
    }
    check_contract(sequences);
    outputs.vocab_size = shape_.vocab_size;
    outputs.logits.clear();
    outputs.hidden_size = shape_.hidden_size;
    outputs.hidden.clear();
    outputs.tokens.clear();
    clear(outputs.drawn_logprobs, sequences);
    for (const SequenceStep& sequence : sequences) {
      for (std::size_t i = 0; i < sequence.tokens.size(); ++i) {
        const std::int32_t position = sequence.start_position + static_cast<std::int32_t>(i);
        for (int group = 0; group < num_groups(); ++group) {
          slot(sequence, group, position) = {sequence.tokens[i], position, sequence.adapter};
        }
      }
      num_tokens_ += static_cast<std::int64_t>(sequence.tokens.size());
    }
    for (const SequenceStep& sequence : sequences) {
      const auto last = sequence.start_position + static_cast<std::int32_t>(sequence.tokens.size()) - 1;
      const std::int32_t first = last + 1 - static_cast<std::int32_t>(sequence.num_output_rows());
      for (std::int32_t position = first; position <= last; ++position) {
        const std::uint64_t hash =
            hash_of(shape_, position, [&](int group, std::int32_t seen) { return slot(sequence, group, seen); });
        const TokenId begin = position == 0 ? sequence.tokens[0] : first_token(sequence);
        if (sequence.hidden) {
          outputs.hidden.resize(outputs.hidden.size() + static_cast<std::size_t>(shape_.hidden_size));
          fake_hidden(hash, begin, std::span(outputs.hidden).last(static_cast<std::size_t>(shape_.hidden_size)));
          continue;
        }
        outputs.logits.resize(outputs.logits.size() + static_cast<std::size_t>(shape_.vocab_size));
        fake_logits(hash, begin, outputs.row(outputs.rows() - 1));
        if (sequence.sampling) {
          outputs.tokens.push_back(draw(sequence, outputs.row(outputs.rows() - 1)));
          list_logprobs(sequence, outputs);
          outputs.logits.resize(outputs.logits.size() - static_cast<std::size_t>(shape_.vocab_size));
          ++num_drawn_tokens_;
        }
      }
    }
  }

  /// Runs the step at once; the caller sees at `finish` what came of it.
  void queue(std::span<const SequenceStep> sequences) override {
    require(queues() && queued_.size() < 2, "a step to queue where there is no room");
    std::vector<SequenceStep> steps(sequences.begin(), sequences.end());
    std::vector<TokenId> fed;
    fed.reserve(steps.size());
    for (SequenceStep& step : steps) {
      if (step.fed < 0) {
        continue;
      }
      require(step.tokens.size() == 1, "several tokens in place of the one that was drawn");
      require(static_cast<std::size_t>(step.fed) < drawn_.size(), "a token that nobody has drawn");
      fed.push_back(std::max(drawn_[static_cast<std::size_t>(step.fed)], 0));
      step.tokens = std::span(fed).last(1);
    }
    StepOutputs outputs;
    try {
      step(steps, outputs);
    } catch (...) {
      queued_.clear();
      throw;
    }
    require(queued_.empty() || (outputs.logits.empty() && outputs.hidden.empty()), "rows for the host behind a step");
    drawn_ = outputs.tokens;
    queued_.push_back(std::move(outputs));
  }

  void finish(StepOutputs& outputs) override {
    require(!queued_.empty(), "nothing to wait for");
    outputs = std::move(queued_.front());
    queued_.pop_front();
  }

  /// As a failure does.
  void forget_queue() { queued_.clear(); }

  void copy_blocks(std::span<const BlockCopy> copies) override {
    for (const BlockCopy& copy : copies) {
      for (std::int32_t i = 0; i < shape_.tokens_per_block; ++i) {
        slot_at(copy.to_tier, copy.group, copy.to, i) = slot_at(copy.from_tier, copy.group, copy.from, i);
      }
      ++num_copies_;
    }
  }

  /// Tokens run so far, over all steps.
  std::int64_t num_tokens() const { return num_tokens_; }
  std::int64_t num_copies() const { return num_copies_; }
  /// Tokens that it drew itself.
  std::int64_t num_drawn_tokens() const { return num_drawn_tokens_; }

 protected:
  int num_groups() const { return static_cast<int>(shape_.kv_groups.size()); }

 private:
  Slot& slot_at(KvTier tier, std::int32_t group, BlockId block, std::int32_t offset) {
    auto& slots = (tier == KvTier::kDevice ? device_ : host_)[static_cast<std::size_t>(group)];
    return slots.at(static_cast<std::size_t>(block * shape_.tokens_per_block + offset));
  }

  Slot& slot(const SequenceStep& sequence, int group, std::int32_t position) {
    const auto& table = sequence.block_tables[static_cast<std::size_t>(group)];
    return slot_at(KvTier::kDevice, group, table[static_cast<std::size_t>(position / shape_.tokens_per_block)],
                   position % shape_.tokens_per_block);
  }

  /// What a sampler on the host would say, which has no more than the row and what the step says of it.
  TokenId draw(const SequenceStep& sequence, std::span<const float> logits) {
    const RowSampling& row = *sequence.sampling;
    SamplingParams params;
    params.temperature = row.temperature;
    params.top_k = row.top_k;
    params.top_p = row.top_p;
    params.min_p = row.min_p;
    params.repetition_penalty = sequence.penalties.repetition;
    params.presence_penalty = sequence.penalties.presence;
    params.frequency_penalty = sequence.penalties.frequency;
    LogitsProcessors processors = make_processors(params, {}, shape_.vocab_size);
    std::vector<TokenId> tokens(row.position);
    std::int32_t num_prompt_tokens = 0;
    if (sequence.penalties.slot >= 0) {
      tokens = count(sequence);
      num_prompt_tokens = sequence.text.num_prompt_tokens;
    }
    std::span<const std::uint32_t> mask;
    if (row.mask >= 0) {
      const auto words = static_cast<std::size_t>((shape_.vocab_size + 31) / 32);
      const std::size_t begin = static_cast<std::size_t>(row.mask) * words;
      mask = sequence.masks->wait(begin + words - 1).subspan(begin, words);
    }
    try {
      return sampler_.sample(logits, {.params = params,
                                      .processors = processors,
                                      .tokens = tokens,
                                      .num_prompt_tokens = num_prompt_tokens,
                                      .seed = row.seed,
                                      .sequence_index = row.sequence_index,
                                      .mask = mask});
    } catch (const Error& e) {
      const bool nothing = std::string(e.what()).starts_with("no token is allowed");
      return nothing ? kNothingAllowed : kDamagedRow;
    }
  }

  /// The text that the slot of `sequence` has counted with this step: what it held and what is new, no more.
  std::vector<TokenId> count(const SequenceStep& sequence) {
    std::vector<TokenId>& counted = counted_[sequence.penalties.slot];
    const CountedText& text = sequence.text;
    require(sequence.sampling->position == text.tokens.size(), "a text that is not the one before the token");
    if (text.num_counted == 0) {
      counted.clear();
    }
    require(counted.size() == static_cast<std::size_t>(text.num_counted), "a slot that has counted something else");
    const auto fresh = text.tokens.subspan(counted.size());
    counted.insert(counted.end(), fresh.begin(), fresh.end());
    return counted;
  }

  static void clear(DrawnLogprobs& drawn, std::span<const SequenceStep> sequences) {
    drawn = {};
    for (const SequenceStep& sequence : sequences) {
      drawn.num_top = std::max(drawn.num_top, sequence.sampling ? sequence.sampling->num_logprobs : 0);
    }
  }

  /// Of the token that was drawn last, from the last row of logits. Places beyond what is asked for are filled, too.
  void list_logprobs(const SequenceStep& sequence, StepOutputs& outputs) {
    DrawnLogprobs& drawn = outputs.drawn_logprobs;
    if (sequence.sampling->num_logprobs < 0) {
      return;
    }
    TokenLogprobs said{-1, std::numeric_limits<double>::quiet_NaN(), {}};
    try {
      said = sampler_.logprobs(outputs.row(outputs.rows() - 1), std::max(outputs.tokens.back(), 0), drawn.num_top);
    } catch (const Error&) {
    }
    said.top.resize(static_cast<std::size_t>(drawn.num_top), {-1, said.logprob});
    drawn.logprobs.push_back(said.logprob);
    for (const auto& [token, logprob] : said.top) {
      drawn.top_ids.push_back(token);
      drawn.top_logprobs.push_back(logprob);
    }
  }

  /// The poison is in the first token, where some group still holds it.
  TokenId first_token(const SequenceStep& sequence) {
    return shape_.kv_groups.front().window == 0 ? slot(sequence, 0, 0).token : -1;
  }

  void check_contract(std::span<const SequenceStep> sequences) const {
    std::size_t total = 0;
    for (const SequenceStep& sequence : sequences) {
      const std::size_t end = static_cast<std::size_t>(sequence.start_position) + sequence.tokens.size();
      total += sequence.tokens.size();
      require(!sequence.tokens.empty(), "a sequence without tokens");
      require(!sequence.sampling || samples(), "a row to draw from, which it cannot");
      require(!sequence.sampling || (sequence.logits == LogitsMode::kLast && !sequence.hidden),
              "a row to draw from that is none");
      check_sampling(sequence);
      require(end <= static_cast<std::size_t>(shape_.max_seq_len), "a sequence beyond max_seq_len");
    }
    require(total >= 1 && total <= static_cast<std::size_t>(shape_.max_num_tokens), "too many tokens");
    require(sequences.size() <= static_cast<std::size_t>(shape_.max_batch_size), "too many sequences");
    for (int group = 0; group < num_groups(); ++group) {
      check_blocks(sequences, group);
    }
  }

  /// No row asks for more than the runner can do, and no two for one slot.
  void check_sampling(const SequenceStep& sequence) const {
    const RowSampling row = sequence.sampling.value_or(RowSampling{});
    const SamplingSupport support = sampling_support();
    require(row.mask < 0 || (support.masks && sequence.masks != nullptr), "a mask");
    require(row.num_logprobs <= support.max_logprobs, "a row with too many log-probabilities");
    require(sequence.penalties.slot < support.count_slots, "a slot that it does not have");
  }

  /// Who writes a block has it alone; all that a token sees is there.
  void check_blocks(std::span<const SequenceStep> sequences, int group) const {
    std::map<BlockId, int> holders;
    for (const SequenceStep& sequence : sequences) {
      for (const BlockId block : sequence.block_tables[static_cast<std::size_t>(group)]) {
        holders[block] += block == kNoBlock ? 0 : 1;
      }
    }
    const std::int32_t window = shape_.kv_groups[static_cast<std::size_t>(group)].window;
    for (const SequenceStep& sequence : sequences) {
      const auto& table = sequence.block_tables[static_cast<std::size_t>(group)];
      const std::int32_t last = sequence.start_position + static_cast<std::int32_t>(sequence.tokens.size()) - 1;
      require(static_cast<std::int32_t>(table.size()) * shape_.tokens_per_block > last,
              "a block table that is too short");
      for (std::int32_t position = first_seen(sequence.start_position, window); position <= last; ++position) {
        const BlockId block = table[static_cast<std::size_t>(position / shape_.tokens_per_block)];
        require(block >= 0, "no block where a token looks");
        require(position < sequence.start_position || holders[block] == 1, "a block to write that two sequences hold");
      }
    }
  }

  static void require(bool holds, const std::string& what) {
    if (!holds) {
      throw std::logic_error("the fake runner was given " + what);
    }
  }

  ModelShape shape_;
  Hook hook_;
  Sampler sampler_;
  std::int64_t num_steps_ = 0;
  std::int64_t num_tokens_ = 0;
  std::int64_t num_copies_ = 0;
  std::int64_t num_drawn_tokens_ = 0;
  std::deque<StepOutputs> queued_;
  std::vector<TokenId> drawn_;  ///< by the latest step
  std::array<std::vector<Slot>, kMaxKvGroups> device_;
  std::array<std::vector<Slot>, kMaxKvGroups> host_;
  std::map<std::int32_t, std::vector<TokenId>> counted_;  ///< by slot
};

/// A fake runner that samples where it is asked to, and what it is told to support.
class SamplingRunner : public FakeRunner {
 public:
  using FakeRunner::FakeRunner;
  bool samples() const noexcept override { return true; }
  SamplingSupport sampling_support() const noexcept override { return support; }

  SamplingSupport support{};
};

/// One with a queue of steps, too.
class QueueingRunner : public SamplingRunner {
 public:
  using SamplingRunner::SamplingRunner;
  bool queues() const noexcept override { return true; }
};

}  // namespace aotllm::testing
