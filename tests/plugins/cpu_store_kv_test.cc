#include <algorithm>
#include <cmath>

#include "cpu_test_support.h"
#include "kv_rounding.h"

namespace aotllm::cpu::test {
namespace {

class CpuStoreKv : public OnIsa {};
INSTANTIATE_ON_ISAS(CpuStoreKv);

TEST_P(CpuStoreKv, CodesTouchTheirSlotOnly) {
  Random random(8);
  for (const KvType type : kCodeTypes) {
    for (const int slot : {0, 4, 5, 15}) {
      const int head_dim = 24, tokens = 16;
      const int size = type == KvType::kI16 ? 2 : 1;
      std::vector<float> k = normal(random, head_dim), v = normal(random, head_dim);
      if (slot == 0) std::fill(v.begin(), v.end(), 0.0f);
      const auto bytes = kv_head_bytes(type, head_dim, tokens);
      AlignedBytes k_block(bytes), v_block(bytes);
      std::memset(k_block.data(), 0x5A, bytes);
      std::memset(v_block.data(), 0x5A, bytes);
      ops().store_kv(k.data(), v.data(), head_dim, type, k_block.data(), v_block.data(), slot, tokens);

      const Scales scales = scales_of(type, k.data(), v.data(), head_dim);
      const auto check = [&](const AlignedBytes& block, const std::vector<float>& x, double scale, const auto& place) {
        std::vector<std::uint8_t> expected(bytes, 0x5A);
        float stored = 0.0f;
        std::memcpy(&stored, block.data() + head_dim * tokens * size + slot * 4, 4);
        EXPECT_FLOAT_EQ(stored, static_cast<float>(scale));
        std::memcpy(expected.data() + head_dim * tokens * size + slot * 4, &stored, 4);
        for (int d = 0; d < head_dim; ++d) {
          const float code = stored == 0.0f ? 0.0f : std::nearbyint(x[static_cast<std::size_t>(d)] / stored);
          const auto wide = static_cast<std::int16_t>(code);
          std::memcpy(expected.data() + place(d) * size, &wide, static_cast<std::size_t>(size));
        }
        EXPECT_EQ(std::vector<std::uint8_t>(block.data(), block.data() + bytes), expected) << "slot " << slot;
      };
      check(k_block, k, scales.k, [&](int d) { return (d / 2 * tokens + slot) * 2 + d % 2; });
      check(v_block, v, scales.v, [&](int d) { return (slot / 2 * head_dim + d) * 2 + slot % 2; });
    }
  }
}

TEST_P(CpuStoreKv, FloatsTouchTheirSlotOnly) {
  Random random(6);
  const int head_dim = 24, tokens = 16, slot = 5;
  const std::vector<float> k = normal(random, head_dim), v = normal(random, head_dim);
  AlignedBytes k_block(head_dim * tokens * 4), v_block(head_dim * tokens * 4);
  std::memset(k_block.data(), 0x5A, k_block.size());
  std::memset(v_block.data(), 0x5A, v_block.size());
  std::vector<std::uint8_t> expected_k(k_block.size(), 0x5A), expected_v(v_block.size(), 0x5A);
  for (int d = 0; d < head_dim; ++d) {
    std::memcpy(expected_k.data() + (d * tokens + slot) * 4, &k[static_cast<std::size_t>(d)], 4);
    std::memcpy(expected_v.data() + (slot * head_dim + d) * 4, &v[static_cast<std::size_t>(d)], 4);
  }
  ops().store_kv(k.data(), v.data(), head_dim, KvType::kF32, k_block.data(), v_block.data(), slot, tokens);
  EXPECT_EQ(std::vector<std::uint8_t>(k_block.data(), k_block.data() + k_block.size()), expected_k);
  EXPECT_EQ(std::vector<std::uint8_t>(v_block.data(), v_block.data() + v_block.size()), expected_v);
}

TEST_P(CpuStoreKv, Bfloat16TouchesItsSlotOnly) {
  Random random(13);
  const int head_dim = 24, tokens = 16;
  const std::vector<float> k = normal(random, head_dim), v = normal(random, head_dim);
  const auto bytes = kv_head_bytes(KvType::kBF16, head_dim, tokens);
  ASSERT_EQ(bytes, std::size_t{head_dim * tokens * 2});
  for (const int slot : {0, 5, 15}) {
    AlignedBytes k_block(bytes), v_block(bytes);
    std::memset(k_block.data(), 0x5A, bytes);
    std::memset(v_block.data(), 0x5A, bytes);
    std::vector<std::uint8_t> expected_k(bytes, 0x5A), expected_v(bytes, 0x5A);
    const auto put = [](std::vector<std::uint8_t>& block, int element, float x) {
      to_bf16_and_back(&x, 1);
      std::memcpy(block.data() + element * 2, reinterpret_cast<const std::uint8_t*>(&x) + 2, 2);
    };
    for (int d = 0; d < head_dim; ++d) {
      put(expected_k, (d / 2 * tokens + slot) * 2 + d % 2, k[static_cast<std::size_t>(d)]);
      put(expected_v, (slot / 2 * head_dim + d) * 2 + slot % 2, v[static_cast<std::size_t>(d)]);
    }
    ops().store_kv(k.data(), v.data(), head_dim, KvType::kBF16, k_block.data(), v_block.data(), slot, tokens);
    EXPECT_EQ(std::vector<std::uint8_t>(k_block.data(), k_block.data() + bytes), expected_k) << "slot " << slot;
    EXPECT_EQ(std::vector<std::uint8_t>(v_block.data(), v_block.data() + bytes), expected_v) << "slot " << slot;
  }
}

}  // namespace
}  // namespace aotllm::cpu::test
