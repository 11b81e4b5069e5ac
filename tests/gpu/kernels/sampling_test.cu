#include "sampling/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "aotllm/errors.h"
#include "aotllm/sampler.h"
#include "reference.h"
#include "sampling/penalties.h"
#include "sampling_batch.h"

namespace aotllm::cuda {
namespace {

TEST(Sampling, ChoosesWhatTheSamplerOfTheCpuChooses) {
  AOTLLM_NEEDS_GPU();
  for (const int vocab : {1, 2, 3, 5, 31, 37, 255, 1000, 4099, 32000, 128256, 151937, 262144, 262208, 300000}) {
    SamplingBatch batch(vocab);
    for (const char* name : {"normal", "flat", "steep", "bf16", "steps", "equal", "zeros", "sparse", "huge", "peak"}) {
      for (int kind = 0; kind < 6; ++kind) {
        const int repeats = vocab <= 4099 ? 8 : vocab <= 32000 ? 3 : 1;
        for (int i = 0; i < repeats; ++i) batch.add(make_row(vocab, name), make_params(vocab, kind), name);
      }
    }
    expect_tokens(batch, sample);
  }
}

TEST(Sampling, MasksRuleTokensOut) {
  AOTLLM_NEEDS_GPU();
  std::mt19937& random = random_engine();
  for (const int vocab : {1, 33, 1001, 32000, 128256, 299999}) {
    SamplingBatch batch(vocab);
    for (int i = 0; i < 24; ++i) {
      RowSampling params = make_params(vocab, i % 6);
      params.mask = i % 5 - 1;
      std::vector<float> row = make_row(vocab, "normal");
      if (params.mask == 3) row[0] = NAN;  // not allowed, thus nobody looks
      batch.add(row, params, "normal");
    }
    batch.masks.resize(4 * static_cast<std::size_t>(batch.words));
    for (int word = 0; word < batch.words; ++word) {
      batch.masks[word] = random();
      batch.masks[batch.words + word] = random() & random() & random() & random() & random() & random();
      batch.masks[2 * batch.words + word] = 0;  // nothing is allowed
      batch.masks[3 * batch.words + word] = ~(word == 0 ? 1U : 0U);
    }
    expect_tokens(batch, sample);
  }
}

TEST(Sampling, DamagedRowsHaveNoToken) {
  AOTLLM_NEEDS_GPU();
  for (const int vocab : {3, 1001, 128256}) {
    SamplingBatch batch(vocab);
    for (int kind = 0; kind < 6; ++kind) {
      for (const float damage : {NAN, -NAN, kInfinity, -kInfinity}) {
        for (const int at : {0, vocab / 2, vocab - 1}) {
          std::vector<float> row = make_row(vocab, "normal");
          row[at] = damage;  // -inf is none
          batch.add(row, make_params(vocab, kind), "damaged");
        }
      }
      batch.add(std::vector<float>(vocab, -kInfinity), make_params(vocab, kind), "nothing");
    }
    expect_tokens(batch, sample);
    for (RowSampling& params : batch.params) params = RowSampling{};
    expect_tokens(batch, sample_greedy);
  }
}

TEST(Sampling, GreedyTakesTheLowestIdAmongEquals) {
  AOTLLM_NEEDS_GPU();
  for (const int vocab : {1, 2, 3, 4, 5, 7, 31, 37, 1000, 32003, 128256, 151937, 262144, 300001}) {
    for (const int rows : {1, 5, 17, 70}) {
      SamplingBatch batch(vocab);
      for (int i = 0; i < rows; ++i) {
        const char* names[] = {"normal", "steps", "equal", "zeros", "sparse", "huge"};
        const char* name = names[(i + rows) % 6];
        batch.add(make_row(vocab, name), RowSampling{}, name);
      }
      expect_tokens(batch, sample_greedy);
      if (rows > 5 && vocab > 100000) break;
    }
  }
}

TEST(Sampling, PenaltiesAreThoseOfTheCpu) {
  AOTLLM_NEEDS_GPU();
  std::mt19937& random = random_engine();
  constexpr int kRows = 24;
  for (const int vocab : {2, 37, 1001, 128256}) {
    SamplingBatch batch(vocab);
    std::vector<RowPenalties> penalties(kRows);
    std::vector<std::vector<TokenId>> texts(kRows);
    std::vector<std::int32_t> prompt_tokens, prompt_slots, generated_tokens, generated_slots;
    constexpr int kPromptLength = 40;
    for (int i = 0; i < kRows; ++i) {
      RowSampling params = make_params(vocab, i % 6);
      texts[i].resize(kPromptLength + random() % 200);
      params.position = static_cast<std::uint32_t>(texts[i].size());
      std::vector<float> row = make_row(vocab, i % 2 == 0 ? "normal" : "steps");
      row[random() % vocab] = -kInfinity;
      batch.add(row, params, "penalized");
      penalties[i] = {1.0 + 0.3 * (i % 3), 0.7 * (i % 5 - 2), 0.3 * (i % 4 - 1), i % 7 == 6 ? -1 : kRows - 1 - i};
      for (std::size_t t = 0; t < texts[i].size(); ++t) {
        texts[i][t] = static_cast<TokenId>(random() % std::min(vocab, t % 2 == 0 ? 30 : vocab));
        if (t % 2 == 0) texts[i][t] = std::max_element(row.begin(), row.end()) - row.begin();
        (t < kPromptLength ? prompt_tokens : generated_tokens).push_back(texts[i][t]);
        (t < kPromptLength ? prompt_slots : generated_slots).push_back(penalties[i].slot);
      }
    }
    DeviceArray<std::uint32_t> counts(static_cast<std::size_t>(kRows) * vocab);
    counts.fill(0xFF);
    std::vector<std::int32_t> all_slots(kRows);
    for (int i = 0; i < kRows; ++i) all_slots[i] = i;
    const DeviceArray<std::int32_t> slots(all_slots);
    const DeviceArray<std::int32_t> tokens1(prompt_tokens), slots1(prompt_slots), tokens2(generated_tokens),
        slots2(generated_slots);
    const Stream stream{nullptr, true};
    clear_counts(counts.data(), vocab, slots.data(), kRows, stream);
    const int num_prompt = static_cast<int>(tokens1.size());
    const int num_generated = static_cast<int>(tokens2.size());
    count_tokens({counts.data(), vocab, num_prompt, tokens1.data(), slots1.data(), true}, stream);
    count_tokens({counts.data(), vocab, num_generated, tokens2.data(), slots2.data(), false}, stream);
    const DeviceArray<float> logits(batch.logits);
    const DeviceArray<RowSampling> params(batch.params);
    const DeviceArray<RowPenalties> on_device(penalties);
    DeviceArray<std::int32_t> chosen(std::vector<std::int32_t>(kRows, kUntouched));
    SamplingArgs args;
    args.logits = logits.data();
    args.vocab_size = vocab;
    args.num_rows = kRows;
    args.params = params.data();
    args.penalties = on_device.data();
    args.counts = counts.data();
    args.tokens = chosen.data();
    sample(args, stream);
    const std::vector<std::int32_t> got = chosen.download();
    const DeviceArray<std::uint8_t> workspace = poisoned_workspace(kRows, vocab);
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.size();
    sample(args, {nullptr, false, 80});
    EXPECT_EQ(got, chosen.download()) << "the kernels before SM90 choose others";
    Sampler sampler(vocab);
    for (int i = 0; i < kRows; ++i) {
      SamplingParams on_host = params_of(batch.params[i]);
      LogitsProcessors processors;
      if (penalties[i].slot >= 0) {
        on_host.repetition_penalty = penalties[i].repetition;
        on_host.presence_penalty = penalties[i].presence;
        on_host.frequency_penalty = penalties[i].frequency;
        processors.penalties.push_back(std::make_unique<Penalties>(on_host));
      }
      TokenId want = -1;
      try {
        want = sampler.sample(batch.row(i), {.params = on_host,
                                             .processors = processors,
                                             .tokens = texts[i],
                                             .num_prompt_tokens = kPromptLength,
                                             .seed = batch.params[i].seed,
                                             .sequence_index = batch.params[i].sequence_index});
      } catch (const Error& e) {
        want = no_token(e);
      }
      EXPECT_EQ(got[i], want) << "vocabulary " << vocab << ", row " << i;
    }
  }
}

TEST(Sampling, DrawsFollowTheDistribution) {
  AOTLLM_NEEDS_GPU();
  SamplingBatch batch(5);
  constexpr int kDraws = 20000;
  const std::vector<float> row = {0.0F, 1.0F, -1.0F, 0.5F, -30.0F};
  RowSampling params;
  params.temperature = 1.0F;
  for (int i = 0; i < kDraws; ++i) {
    params.position = i;
    batch.add(row, params, "fixed");
  }
  std::vector<int> counts(5);
  for (const std::int32_t token : device_tokens(batch, sample)) ++counts.at(token);
  double total = 0.0;
  for (const float logit : row) total += std::exp(logit);
  for (int token = 0; token < 5; ++token) {
    const double p = std::exp(row[token]) / total;
    EXPECT_NEAR(counts[token], p * kDraws, 5.0 * std::sqrt(p * kDraws) + 1.0) << token;
  }
}

}  // namespace
}  // namespace aotllm::cuda
