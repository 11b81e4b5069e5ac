#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "aotllm/sampler.h"
#include "reference.h"
#include "sampling/sampling.h"
#include "sampling_batch.h"

namespace aotllm::cuda {
namespace {

TEST(RowLogprobs, AreThoseOfTheSamplerOfTheCpu) {
  AOTLLM_NEEDS_GPU();
  for (const int vocab : {1, 3, 37, 1000, 4099, 128256, 151937, 262144, 300000}) {
    for (const int num_top : {0, 1, 5, 20, 200}) {
      SamplingBatch batch(vocab);
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
