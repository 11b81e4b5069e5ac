#include "elementwise/elementwise.h"
#include "elementwise_check.h"

namespace aotllm::cuda {
namespace {

TEST(Embedding, RowsOfTheTableScaledAndRoundedOnce) {
  AOTLLM_NEEDS_GPU();
  constexpr int kVocab = 97;
  for (const int width : {8, 136, 1000, 4096, 5384}) {
    for (const int m : {1, 2, 33, 300}) {
      for (const float scale : {1.0f, 62.25f, 45.2548f}) {
        const std::vector<Bf16> table = random_bf16(static_cast<std::size_t>(kVocab) * width);
        std::vector<std::int32_t> tokens(m);
        for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(random_engine()() % kVocab);
        if (m > 1) tokens[1] = -1;
        const DeviceArray<Bf16> device_table(table);
        const DeviceArray<std::int32_t> device_tokens(tokens);
        DeviceArray<Bf16> out(static_cast<std::size_t>(m + 2) * width);
        out.fill(0xFF);
        embedding(device_tokens.data(), m, device_table.data(), width, scale, out.data(), Stream{});
        const std::vector<Bf16> got = out.download();
        int wrong = 0;
        for (int t = 0; t < m; ++t) {
          for (int j = 0; j < width; ++j) {
            const float value = tokens[t] < 0 ? 0.0f : __bfloat162float(table[tokens[t] * width + j]);
            const Bf16 want = __float2bfloat16_rn(scale * value);
            wrong += __bfloat162float(got[t * width + j]) != __bfloat162float(want);
          }
        }
        EXPECT_EQ(wrong, 0) << "width " << width << ", m " << m << ", scale " << scale;
        EXPECT_TRUE(untouched(bytes_from(got, static_cast<std::size_t>(m) * width)));
      }
    }
  }
}

/// Tokens of another kernel, and of no kernel that says a sound one.
TEST(Embedding, TokensBelowZeroStandForThoseThatWereDrawn) {
  AOTLLM_NEEDS_GPU();
  constexpr int kWidth = 136;
  const std::vector<Bf16> table = random_bf16(std::size_t{20} * kWidth);
  const std::vector<std::int32_t> drawn = {7, -1, 19, 3, -2};
  const std::vector<std::int32_t> tokens = {-4, 5, -1, -2, -3, -5, 0};  // drawn[3], 5, drawn[0], drawn[1], …
  const std::vector<std::int32_t> meant = {3, 5, 7, -1, 19, -1, 0};
  const int m = static_cast<int>(tokens.size());
  const DeviceArray<Bf16> device_table(table);
  const DeviceArray<std::int32_t> device_tokens(tokens);
  const DeviceArray<std::int32_t> device_drawn(drawn);
  DeviceArray<Bf16> out(tokens.size() * kWidth);
  for (const TokenRange held : {TokenRange{}, TokenRange{4, 15}}) {
    out.fill(0xFF);
    embedding(device_tokens.data(), m, device_table.data(), kWidth, 1.0f, out.data(), Stream{}, held,
              device_drawn.data());
    const std::vector<Bf16> got = out.download();
    for (int t = 0; t < m; ++t) {
      const int row = meant[t] - held.begin;
      const bool is_held = meant[t] >= 0 && row >= 0 && row < held.count;
      for (int j = 0; j < kWidth; ++j) {
        const float want = is_held ? __bfloat162float(table[row * kWidth + j]) : 0.0f;
        ASSERT_EQ(__bfloat162float(got[t * kWidth + j]), want) << "row " << t << ", held from " << held.begin;
      }
    }
  }
}

}  // namespace
}  // namespace aotllm::cuda
