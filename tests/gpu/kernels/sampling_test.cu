#include "sampling/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "aotllm/errors.h"
#include "aotllm/sampler.h"
#include "reference.h"
#include "sampling/penalties.h"

namespace aotllm::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int32_t kUntouched = -77;

/// Rows of logits with how they are sampled.
struct Batch {
  explicit Batch(int vocab) : vocab_size(vocab), words((vocab + 31) / 32) {}

  void add(const std::vector<float>& row, const RowSampling& sampling, std::string name) {
    logits.insert(logits.end(), row.begin(), row.end());
    params.push_back(sampling);
    names.push_back(std::move(name));
  }
  int rows() const { return static_cast<int>(params.size()); }
  std::span<const float> row(int i) const {
    return std::span(logits).subspan(static_cast<std::size_t>(i) * vocab_size, vocab_size);
  }
  std::span<const std::uint32_t> mask(int i) const {
    return params[i].mask < 0 ? std::span<const std::uint32_t>()
                              : std::span(masks).subspan(static_cast<std::size_t>(params[i].mask) * words, words);
  }

  int vocab_size;
  int words;
  std::vector<float> logits;
  std::vector<RowSampling> params;
  std::vector<std::uint32_t> masks;
  std::vector<std::string> names;
};

SamplingParams params_of(const RowSampling& row) {
  SamplingParams params;
  params.temperature = row.temperature;
  params.top_k = row.top_k;
  params.top_p = row.top_p;
  params.min_p = row.min_p;
  return params;
}

/// What the device says of a row that the sampler of the CPU refuses.
std::int32_t no_token(const Error& refusal) {
  return std::string(refusal.what()).starts_with("no token is allowed") ? kNothingAllowed : kDamagedRow;
}

/// What the sampler of the CPU says; no_token where it throws.
std::int32_t expected_token(const Batch& batch, int i, Sampler& sampler) {
  const RowSampling& row = batch.params[i];
  const SamplingParams params = params_of(row);
  LogitsProcessors processors;
  const std::vector<TokenId> tokens(row.position);
  try {
    return sampler.sample(batch.row(i), {.params = params,
                                         .processors = processors,
                                         .tokens = tokens,
                                         .seed = row.seed,
                                         .sequence_index = row.sequence_index,
                                         .mask = batch.mask(i)});
  } catch (const Error& e) {
    return no_token(e);
  }
}

std::vector<std::int32_t> expected_tokens(const Batch& batch) {
  std::vector<std::int32_t> tokens(batch.params.size());
  std::vector<std::thread> threads;
  const int num_threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  for (int thread = 0; thread < num_threads; ++thread) {
    threads.emplace_back([&, thread] {
      Sampler sampler(batch.vocab_size);
      for (int i = thread; i < batch.rows(); i += num_threads) tokens[i] = expected_token(batch, i, sampler);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return tokens;
}

using Sample = void (*)(const SamplingArgs&, const Stream&);

/// What the kernels before SM90 take; nothing of it may need to be there.
DeviceArray<std::uint8_t> poisoned_workspace(std::size_t rows, int vocab_size) {
  DeviceArray<std::uint8_t> workspace(sampling_workspace_bytes(static_cast<int>(rows), vocab_size, 80));
  workspace.fill(0xFF);
  return workspace;
}

/// Tokens of the device, the same in each of three launches that may overlap, and in one with the kernels before SM90.
std::vector<std::int32_t> device_tokens(const Batch& batch, Sample run) {
  const DeviceArray<float> logits(batch.logits);
  const DeviceArray<RowSampling> params(batch.params);
  const DeviceArray<std::uint32_t> masks(batch.masks);
  const std::size_t rows = batch.params.size();
  std::vector<std::vector<std::int32_t>> results;
  const DeviceArray<std::uint8_t> workspace = poisoned_workspace(rows, batch.vocab_size);
  DeviceArray<std::int32_t> tokens(std::vector<std::int32_t>(4 * (rows + 1), kUntouched));
  for (int launch = 0; launch < 4; ++launch) {
    SamplingArgs args;
    args.logits = logits.data();
    args.vocab_size = batch.vocab_size;
    args.num_rows = static_cast<int>(rows);
    args.params = params.data();
    args.masks = masks.data();
    args.tokens = tokens.data() + launch * (rows + 1);
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.size();
    run(args, {nullptr, launch == 1 || launch == 2, launch < 3 ? 90 : 80});
  }
  std::vector<std::int32_t> all = tokens.download();
  for (int launch = 1; launch < 4; ++launch) {
    EXPECT_TRUE(std::equal(all.begin(), all.begin() + rows + 1, all.begin() + launch * (rows + 1)))
        << "launch " << launch << " says something else";
  }
  EXPECT_EQ(all[rows], kUntouched);
  all.resize(rows);
  return all;
}

void expect_tokens(const Batch& batch, Sample run) {
  const std::vector<std::int32_t> got = device_tokens(batch, run);
  const std::vector<std::int32_t> expected = expected_tokens(batch);
  int wrong = 0;
  for (int i = 0; i < batch.rows(); ++i) {
    const std::int32_t want = expected[i];
    if (got[i] == want) continue;
    const RowSampling& row = batch.params[i];
    if (++wrong <= 6) {
      ADD_FAILURE() << "vocabulary " << batch.vocab_size << ", row " << i << " (" << batch.names[i] << "): token "
                    << got[i] << ", not " << want << "; temperature " << row.temperature << ", top_k " << row.top_k
                    << ", top_p " << row.top_p << ", min_p " << row.min_p << ", mask " << row.mask;
    }
  }
  if (wrong > 0) std::printf("  vocabulary %d: %d of %d rows differ\n", batch.vocab_size, wrong, batch.rows());
}

float as_bf16(float value) {
  return static_cast<float>(from_bf16(__float2bfloat16_rn(value)));
}

/// Shapes of distributions, by name.
std::vector<float> make_row(int vocab, const std::string& name) {
  std::mt19937& random = random_engine();
  std::vector<float> row = random_normal(vocab, name == "flat" ? 0.3F : name == "steep" ? 9.0F : 3.0F);
  if (name == "bf16") std::ranges::transform(row, row.begin(), as_bf16);
  if (name == "steps") std::ranges::transform(row, row.begin(), [](float x) { return std::floor(x); });
  if (name == "equal") std::ranges::fill(row, 1.25F);
  if (name == "zeros") {
    for (float& x : row) x = random() % 2 == 0 ? 0.0F : -0.0F;
  }
  if (name == "sparse") {
    for (float& x : row) x = random() % 50 == 0 ? x : -kInfinity;
    row[random() % row.size()] = 1.0F;
  }
  if (name == "huge") {
    for (float& x : row) x *= 2e37F;
  }
  if (name == "peak") row[random() % row.size()] = 40.0F;
  return row;
}

RowSampling make_params(int vocab, int kind) {
  std::mt19937& random = random_engine();
  const auto one_of = [&](std::initializer_list<float> values) { return values.begin()[random() % values.size()]; };
  RowSampling row;
  row.temperature = kind == 0 ? 0.0F : one_of({0.7F, 1.0F, 2.0F, 0.01F, FLT_MIN, 1.3F, 1.0F, 0.8F});
  if (kind == 2 || kind == 4) {
    const std::int32_t choices[] = {1, 2, 5, 50, 50, 1000, 20000, vocab - 1, vocab, vocab + 5};
    row.top_k = choices[random() % std::size(choices)];
  }
  if (kind == 3 || kind == 4) row.top_p = one_of({1e-9F, 0.1F, 0.5F, 0.9F, 0.9F, 0.99F, 1.0F - 0x1.0p-24F});
  if (kind == 5 || random() % 4 == 0) row.min_p = one_of({0.05F, 0.5F, 1.0F, 1e-5F});
  row.seed = random() * 0x100000001ULL;
  row.position = random() % 300;
  row.sequence_index = random() % 3;
  return row;
}

TEST(Sampling, ChoosesWhatTheSamplerOfTheCpuChooses) {
  AOTLLM_NEEDS_GPU();
  for (const int vocab : {1, 2, 3, 5, 31, 37, 255, 1000, 4099, 32000, 128256, 151937, 262144, 262208, 300000}) {
    Batch batch(vocab);
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
    Batch batch(vocab);
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
    Batch batch(vocab);
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
      Batch batch(vocab);
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
    Batch batch(vocab);
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
  Batch batch(5);
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

TEST(RowLogprobs, AreThoseOfTheSamplerOfTheCpu) {
  AOTLLM_NEEDS_GPU();
  for (const int vocab : {1, 3, 37, 1000, 4099, 128256, 151937, 262144, 300000}) {
    for (const int num_top : {0, 1, 5, 20, 200}) {
      Batch batch(vocab);
      for (const char* name : {"normal", "flat", "steep", "bf16", "steps", "equal", "sparse", "peak"}) {
        batch.add(make_row(vocab, name), {}, name);
      }
      const int rows = batch.rows();
      std::vector<std::int32_t> pick(rows);
      std::vector<std::int32_t> tokens(rows);
      for (int i = 0; i < rows; ++i) {
        pick[i] = rows - 1 - i;
        tokens[pick[i]] = static_cast<std::int32_t>(random_engine()() % vocab);
      }
      const DeviceArray<float> logits(batch.logits);
      const DeviceArray<std::int32_t> rows_device(pick);
      const DeviceArray<std::int32_t> tokens_device(tokens);
      DeviceArray<double> logprobs(static_cast<std::size_t>(rows));
      DeviceArray<std::int32_t> ids(static_cast<std::size_t>(rows) * num_top + 1);
      DeviceArray<double> tops(static_cast<std::size_t>(rows) * num_top + 1);
      const DeviceArray<std::uint8_t> workspace = poisoned_workspace(static_cast<std::size_t>(rows), vocab);
      RowLogprobsArgs args{logits.data(),   vocab,      rows,        rows_device.data(), tokens_device.data(), num_top,
                           logprobs.data(), ids.data(), tops.data(), workspace.data(),   workspace.size()};
      const auto run = [&](int sm) {
        logprobs.fill(0xFF);
        ids.fill(0xFF);
        tops.fill(0xFF);
        row_logprobs(args, {nullptr, false, sm});
        row_logprobs(args, {nullptr, sm >= 90, sm});
      };
      run(80);
      const auto before_ids = ids.download();
      const auto before_tops = tops.download();
      run(90);
      const auto got = logprobs.download();
      const auto got_ids = ids.download();
      const auto got_tops = tops.download();
      EXPECT_EQ(before_ids, got_ids);
      EXPECT_EQ(std::memcmp(before_tops.data(), got_tops.data(), tops.bytes()), 0);
      Sampler sampler(vocab);
      double worst = 0.0;
      for (int i = 0; i < rows; ++i) {
        const auto want = sampler.logprobs(batch.row(pick[i]), tokens[pick[i]], std::min(num_top, vocab));
        const auto far = [](double a, double b) { return a == b ? 0.0 : std::abs(a - b); };
        worst = std::max(worst, far(got[i], want.logprob));
        for (int k = 0; k < num_top; ++k) {
          const std::size_t at = static_cast<std::size_t>(i) * num_top + k;
          const bool there = k < static_cast<int>(want.top.size());
          ASSERT_EQ(got_ids[at], there ? want.top[k].first : -1)
              << "vocabulary " << vocab << ", row " << i << " (" << batch.names[pick[i]] << "), place " << k << " of "
              << num_top;
          if (there) worst = std::max(worst, far(got_tops[at], want.top[k].second));
        }
      }
      EXPECT_LT(worst, 4e-9) << "vocabulary " << vocab << ", " << num_top << " listed";
      EXPECT_EQ(got_ids.back(), -1);
    }
  }
}

TEST(RowLogprobs, OfDamagedRowsAreNone) {
  AOTLLM_NEEDS_GPU();
  std::vector<float> row(100, 1.0F);
  row[7] = NAN;
  const DeviceArray<float> logits(row);
  const DeviceArray<std::int32_t> tokens(std::vector<std::int32_t>{3});
  DeviceArray<double> logprob(1);
  DeviceArray<double> tops(2);
  DeviceArray<std::int32_t> ids(std::vector<std::int32_t>{5, 5});
  logprob.fill(0);
  tops.fill(0);
  row_logprobs({logits.data(), 100, 1, nullptr, tokens.data(), 2, logprob.data(), ids.data(), tops.data()}, {});
  EXPECT_TRUE(std::isnan(logprob.download()[0]));
  EXPECT_TRUE(std::isnan(tops.download()[1]));
  EXPECT_EQ(ids.download(), (std::vector<std::int32_t>{-1, -1}));
}

}  // namespace
}  // namespace aotllm::cuda
