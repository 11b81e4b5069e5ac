#include "runner/cuda/step_sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "aotllm/errors.h"
#include "aotllm/sampler.h"
#include "reference.h"
#include "sampling/processors.h"

namespace aotllm::cuda {
namespace {

constexpr int kTexts = 8;

ModelShape shape_of(int vocab) {
  return {.vocab_size = vocab,
          .num_layers = 1,
          .max_seq_len = 20480,
          .max_num_tokens = 64,
          .max_batch_size = kTexts,
          .tokens_per_block = 64,
          .kv_groups = {{.window = 0, .bytes_per_block = 64}}};
}

/// A sequence that is sampled again and again, with what the host's sampler needs for the same.
struct Text {
  SamplingParams params;
  std::vector<TokenId> tokens;
  std::int32_t num_prompt_tokens = 0;
  std::int32_t num_counted = 0;
  std::int32_t slot = -1;
  std::int32_t num_logprobs = -1;
  bool masked = false;
  LogitsProcessors processors;
};

int random_below(int bound) {
  return static_cast<int>(random_engine()() % static_cast<unsigned>(bound));
}

TokenId random_token(int vocab) {
  return random_below(std::min(vocab, random_below(2) == 0 ? 20 : vocab));
}

/// Text `index` has one feature, or all of them.
Text make_text(int vocab, int index, int prompt_length) {
  Text text;
  text.num_prompt_tokens = prompt_length;
  for (int i = 0; i < prompt_length; ++i) text.tokens.push_back(random_token(vocab));
  text.params.temperature = index % 3 == 0 ? 0.0 : 1.0;
  text.params.top_k = index % 4 == 1 ? 20 : 0;
  text.params.top_p = index % 4 == 2 ? 0.75 : 1.0;
  const bool all = index == 5 || index == 6;
  if (all || index == 2 || index == 3) {
    text.params.repetition_penalty = 1.25;
    text.params.presence_penalty = 0.5;
    text.params.frequency_penalty = -0.75;
    text.slot = kTexts - 1 - index;
  }
  if (all || index == 1) text.num_logprobs = std::min(5 + index, vocab);
  if (index == 4) text.num_logprobs = 0;
  text.masked = all || index == 3;
  text.processors = make_processors(text.params, {}, vocab);
  return text;
}

class RandomMasks final : public StepMasks {
 public:
  RandomMasks(int count, int vocab) : words_((static_cast<std::size_t>(vocab) + 31) / 32) {
    for (std::size_t i = 0; i < words_ * static_cast<std::size_t>(count); ++i) {
      masks_.push_back(i / words_ == 1 ? 0U : random_engine()());  // the second one forbids all
    }
  }
  std::size_t size() const override { return masks_.size(); }
  std::span<const std::uint32_t> wait(std::size_t seen) override {  // in parts of one mask and a bit
    return std::span(masks_).first(std::min(masks_.size(), seen + words_ + 1));
  }
  std::span<const std::uint32_t> of(std::int32_t index) const {
    return index < 0 ? std::span<const std::uint32_t>() : std::span(masks_).subspan(index * words_, words_);
  }

 private:
  std::size_t words_;
  std::vector<std::uint32_t> masks_;
};

/// Samples one step after the other, and says what the host's sampler says to each of its rows.
class Steps {
 public:
  explicit Steps(int vocab)
      : shape_(shape_of(vocab)), data_(shape_), sampler_(shape_, 64), host_(vocab), vocab_(vocab) {}

  void run(std::vector<Text*> texts, const char* what) {
    RandomMasks masks(kTexts, vocab_);
    const std::vector<SequenceStep> sequences = pack(texts, masks);
    const std::size_t rows = texts.size();
    std::vector<float> logits = random_normal(rows * static_cast<std::size_t>(vocab_), 3.0F);
    if (texts.size() > 4) logits[4 * static_cast<std::size_t>(vocab_)] = NAN;
    const DeviceArray<float> on_device(logits);
    StepShape shape = data_.shape_of(sequences, false);
    shape.sampled += 3;  // padding of a graph
    data_.pack(sequences, shape);
    data_.upload(nullptr);
    ASSERT_TRUE(shape.late) << what;
    sampler_.sample(sequences, data_.view(shape), on_device.data(), {nullptr, true});
    const StepSampler::Needs needs = StepSampler::needs_of(sequences);
    turn_ ^= 1;
    sampler_.fetch(needs, turn_, nullptr);
    check(cudaDeviceSynchronize(), "step");
    StepOutputs outputs;
    sampler_.take(needs, turn_, outputs);
    ASSERT_EQ(outputs.tokens.size(), rows) << what;
    std::size_t listed = 0;
    for (std::size_t i = 0; i < rows; ++i) {
      const auto row = std::span(logits).subspan(i * static_cast<std::size_t>(vocab_), vocab_);
      const std::string name =
          std::string(what) + ", vocabulary " + std::to_string(vocab_) + ", row " + std::to_string(i);
      const TokenId token = expected(*texts[i], row, masks.of(sequences[i].sampling->mask));
      EXPECT_EQ(outputs.tokens[i], token) << name;
      if (texts[i]->num_logprobs >= 0) expect_logprobs(*texts[i], row, token, outputs.drawn_logprobs, listed++, name);
      texts[i]->tokens.push_back(std::max(outputs.tokens[i], 0));
    }
    EXPECT_EQ(outputs.drawn_logprobs.logprobs.size(), listed) << what;
  }

 private:
  std::vector<SequenceStep> pack(const std::vector<Text*>& texts, RandomMasks& masks) {
    std::vector<SequenceStep> sequences;
    std::int32_t num_masks = 0;
    for (Text* text : texts) {
      SequenceStep& step = sequences.emplace_back();
      step.tokens = std::span(text->tokens).last(1);
      step.start_position = static_cast<std::int32_t>(text->tokens.size()) - 1;
      step.block_tables[0] = blocks_;
      RowSampling row;
      row.temperature = static_cast<float>(text->params.temperature);
      row.top_k = text->params.top_k;
      row.top_p = static_cast<float>(text->params.top_p);
      row.seed = 17;
      row.position = static_cast<std::uint32_t>(text->tokens.size());
      row.mask = text->masked ? num_masks++ : -1;
      row.num_logprobs = text->num_logprobs;
      step.sampling = row;
      step.masks = text->masked ? &masks : nullptr;
      if (text->slot >= 0) {
        step.penalties = {text->params.repetition_penalty, text->params.presence_penalty,
                          text->params.frequency_penalty, text->slot};
        step.text = {text->tokens, text->num_prompt_tokens, text->num_counted};
        text->num_counted = static_cast<std::int32_t>(text->tokens.size());
      }
    }
    return sequences;
  }

  TokenId expected(Text& text, std::span<const float> row, std::span<const std::uint32_t> mask) {
    try {
      return host_.sample(row, {.params = text.params,
                                .processors = text.processors,
                                .tokens = text.tokens,
                                .num_prompt_tokens = text.num_prompt_tokens,
                                .seed = 17,
                                .mask = mask});
    } catch (const Error& e) {
      return std::string(e.what()).starts_with("no token is allowed") ? kNothingAllowed : kDamagedRow;
    }
  }

  void expect_logprobs(const Text& text, std::span<const float> row, TokenId token, const DrawnLogprobs& drawn,
                       std::size_t place, const std::string& name) {
    if (token < 0) {
      EXPECT_TRUE(std::isnan(drawn.logprobs.at(place))) << name;
      return;
    }
    const TokenLogprobs want = host_.logprobs(row, token, text.num_logprobs);
    EXPECT_NEAR(drawn.logprobs.at(place), want.logprob, 4e-9) << name;
    for (std::size_t k = 0; k < want.top.size(); ++k) {
      const std::size_t at = place * static_cast<std::size_t>(drawn.num_top) + k;
      EXPECT_EQ(drawn.top_ids.at(at), want.top[k].first) << name << ", place " << k;
      EXPECT_NEAR(drawn.top_logprobs.at(at), want.top[k].second, 4e-9) << name << ", place " << k;
    }
  }

  ModelShape shape_;
  StepData data_;
  StepSampler sampler_;
  int turn_ = 0;
  Sampler host_;
  int vocab_;
  std::vector<BlockId> blocks_ = std::vector<BlockId>(320, 0);
};

TEST(StepSampler, SaysWhatTheSamplerOfTheCpuSaysStepAfterStep) {
  AOTLLM_NEEDS_GPU();
  for (const int vocab : {37, 1001, 128256}) {
    Steps steps(vocab);
    std::array<Text, kTexts> texts;
    for (int i = 0; i < kTexts; ++i) texts[i] = make_text(vocab, i, i == 3 ? 20000 : 10 + i);
    const auto pick = [&](std::initializer_list<int> indices) {
      std::vector<Text*> picked;
      for (const int i : indices) picked.push_back(&texts[i]);
      return picked;
    };
    steps.run(pick({0, 1, 2, 3, 4, 5, 6, 7}), "first step");
    steps.run(pick({7, 6, 5, 4, 3, 2, 1, 0}), "another order");
    steps.run(pick({0, 1, 4}), "log-probabilities only");
    steps.run(pick({0, 3}), "a mask and penalties");
    for (const int i : {2, 6}) {  // others in their slots
      const std::int32_t slot = texts[i].slot;
      texts[i] = make_text(vocab, i, 30);
      ASSERT_EQ(texts[i].slot, slot);
    }
    texts[5].tokens.insert(texts[5].tokens.end(), {3, 1, 4});  // some that no row gave
    for (int i = 0; i < 5; ++i) steps.run(pick({0, 2, 3, 5, 1, 6, 7}), "slots of others");
  }
}

TEST(TokenCounter, TakesAsManySlotsAsFit) {
  EXPECT_EQ(TokenCounter::num_slots(64, 128256), 64);
  EXPECT_EQ(TokenCounter::num_slots(512, 128256), 261);
  EXPECT_EQ(TokenCounter::num_slots(512, 262144), 128);
  EXPECT_EQ(TokenCounter::num_slots(512, 37), 512);
}

}  // namespace
}  // namespace aotllm::cuda
