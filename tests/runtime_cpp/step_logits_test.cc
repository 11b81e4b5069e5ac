#include "runner/step_logits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "aotllm/errors.h"
#include "sampling/row_sampling.h"

namespace aotllm {
namespace {

constexpr std::int32_t kVocab = 203;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

ModelShape shape() {
  ModelShape shape;
  shape.vocab_size = kVocab;
  shape.max_num_tokens = 64;
  shape.max_batch_size = 16;
  return shape;
}

/// What the manager would do with the row.
TokenId from_host(std::span<const float> logits, const SamplingParams& params, const RowSampling& row) {
  Sampler sampler(kVocab);
  LogitsProcessors none;
  const std::vector<TokenId> text(row.position, 1);
  try {
    return sampler.sample(logits, {.params = params,
                                   .processors = none,
                                   .tokens = text,
                                   .num_prompt_tokens = 1,
                                   .seed = row.seed,
                                   .sequence_index = row.sequence_index});
  } catch (const Error& error) {
    return std::string(error.what()).find("no token is allowed") != std::string::npos ? kNothingAllowed : kDamagedRow;
  }
}

class Rows {
 public:
  explicit Rows(unsigned seed) : random_(seed) {}

  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  /// Few values, so that many are equal; sometimes some that are none.
  std::vector<float> logits() {
    std::vector<float> row(kVocab);
    const int values = 2 + below(40);
    for (float& logit : row) logit = 0.5F * static_cast<float>(below(values) - values / 2);
    const int kind = below(8);
    if (kind == 0) std::ranges::fill(row, -kInfinity);
    if (kind <= 2) row[static_cast<std::size_t>(below(kVocab))] = -kInfinity;
    if (kind == 3) row[static_cast<std::size_t>(below(kVocab))] = below(2) == 0 ? kInfinity : std::nanf("");
    return row;
  }

  SamplingParams params() {
    SamplingParams params;
    params.temperature = below(2) == 0 ? 0.0 : 0.1 * (1 + below(15));
    params.top_k = below(3) == 0 ? 0 : below(2 * kVocab);
    params.top_p = below(2) == 0 ? 1.0 : 0.05 + 0.3 * below(3);
    params.min_p = below(3) == 0 ? 0.1 * below(5) : 0.0;
    return params;
  }

 private:
  std::mt19937 random_;
};

TEST(StepLogits, TokensAreThoseOfTheHostWhateverThreadHasWhichPart) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    Rows rows(seed);
    const int num_threads = 1 + rows.below(4);
    StepLogits logits(shape(), num_threads);
    for (int step = 0; step < 3; ++step) {
      const int count = 1 + rows.below(8);
      std::vector<std::vector<float>> values;
      std::vector<SamplingParams> params(static_cast<std::size_t>(count));
      std::vector<SequenceStep> sequences(static_cast<std::size_t>(count));
      const std::vector<TokenId> tokens = {1, 2};
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        values.push_back(rows.logits());
        params[i] = rows.params();
        sequences[i].tokens = tokens;
        if (rows.below(4) == 0) continue;  // the host's
        RowSampling& row = sequences[i].sampling.emplace(row_sampling(params[i]));
        row.seed = seed;
        row.position = static_cast<std::uint32_t>(rows.below(9));
        row.sequence_index = static_cast<std::uint32_t>(i);
      }

      StepOutputs outputs;
      logits.assign(sequences, outputs);
      for (int row = 0; row < count; ++row) {
        for (int begin = 0; begin < kVocab;) {
          const int end = std::min(kVocab, begin + 1 + rows.below(70));
          const std::span part = std::span(values[static_cast<std::size_t>(row)]).subspan(begin, end - begin);
          logits.take(rows.below(num_threads), row, begin, part);
          begin = end;
        }
      }
      if (logits.waits()) {
        for (int thread = 0; thread < num_threads; ++thread) logits.draw(thread, num_threads);
      }
      logits.finish(outputs);

      std::vector<TokenId> expected;
      std::vector<float> given;
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        if (sequences[i].sampling) {
          expected.push_back(from_host(values[i], params[i], *sequences[i].sampling));
        } else {
          given.insert(given.end(), values[i].begin(), values[i].end());
        }
      }
      ASSERT_EQ(outputs.tokens, expected) << "seed " << seed;
      ASSERT_EQ(outputs.logits.size(), given.size());
      const std::size_t bytes = given.size() * sizeof(float);
      ASSERT_TRUE(bytes == 0 || std::memcmp(outputs.logits.data(), given.data(), bytes) == 0) << "seed " << seed;
    }
  }
}

TEST(StepLogits, RowsOfAllTokensAndHiddenOnesAreNotSampled) {
  const std::vector<TokenId> tokens = {1, 2, 3};
  std::vector<SequenceStep> sequences(4);
  for (SequenceStep& sequence : sequences) {
    sequence.tokens = tokens;
    sequence.sampling.emplace();
  }
  sequences[0].logits = LogitsMode::kAll;   // three rows for the host
  sequences[1].hidden = true;               // none
  sequences[2].logits = LogitsMode::kNone;  // none
  StepLogits logits(shape(), 1);
  StepOutputs outputs;
  logits.assign(sequences, outputs);
  const std::vector<float> row(kVocab, 0.25F);
  for (int i = 0; i < 4; ++i) logits.take(0, i, 0, row);
  logits.finish(outputs);
  EXPECT_EQ(outputs.rows(), 3);
  EXPECT_EQ(outputs.tokens, std::vector<TokenId>{0});
}

}  // namespace
}  // namespace aotllm
