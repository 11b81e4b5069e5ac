#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "aotllm/sampler.h"
#include "reference.h"
#include "sampling/sampling.h"

// Batches of rows of logits for the sampling kernels, and what the sampler of the CPU says of them.
namespace aotllm::cuda {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr std::int32_t kUntouched = -77;

/// Rows of logits with how they are sampled.
struct SamplingBatch {
  explicit SamplingBatch(int vocab) : vocab_size(vocab), words((vocab + 31) / 32) {}

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

inline SamplingParams params_of(const RowSampling& row) {
  SamplingParams params;
  params.temperature = row.temperature;
  params.top_k = row.top_k;
  params.top_p = row.top_p;
  params.min_p = row.min_p;
  return params;
}

/// What the device says of a row that the sampler of the CPU refuses.
inline std::int32_t no_token(const Error& refusal) {
  return std::string(refusal.what()).starts_with("no token is allowed") ? kNothingAllowed : kDamagedRow;
}

/// What the sampler of the CPU says; no_token where it throws.
inline std::int32_t expected_token(const SamplingBatch& batch, int i, Sampler& sampler) {
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

inline std::vector<std::int32_t> expected_tokens(const SamplingBatch& batch) {
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
inline DeviceArray<std::uint8_t> poisoned_workspace(std::size_t rows, int vocab_size) {
  DeviceArray<std::uint8_t> workspace(sampling_workspace_bytes(static_cast<int>(rows), vocab_size, 80));
  workspace.fill(0xFF);
  return workspace;
}

/// Tokens of the device, the same in each of three launches that may overlap, and in one with the kernels before SM90.
inline std::vector<std::int32_t> device_tokens(const SamplingBatch& batch, Sample run) {
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

inline void expect_tokens(const SamplingBatch& batch, Sample run) {
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

inline float as_bf16(float value) {
  return static_cast<float>(from_bf16(__float2bfloat16_rn(value)));
}

/// Shapes of distributions, by name.
inline std::vector<float> make_row(int vocab, const std::string& name) {
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

inline RowSampling make_params(int vocab, int kind) {
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

}  // namespace aotllm::cuda
