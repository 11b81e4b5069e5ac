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

}  // namespace
}  // namespace aotllm::cuda
