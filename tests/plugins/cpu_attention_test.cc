#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu_test_support.h"

namespace aotllm::cpu::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// What a cache holds: shape and blocks in shuffled order, every byte NaN until it is written.
class Cache {
 public:
  Cache(KvType type, int head_dim, int tokens_per_block, int blocks, Random& random)
      : type_(type),
        head_dim_(head_dim),
        tokens_per_block_(tokens_per_block),
        half_block_(kv_head_bytes(type, head_dim, tokens_per_block)),
        bytes_(2 * half_block_ * static_cast<std::size_t>(blocks)),
        table_(static_cast<std::size_t>(blocks)) {
    std::memset(bytes_.data(), 0xFF,
                bytes_.size());  // NaN in float32 and in float16, and -1 with a scale of NaN in int8
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), random);
  }

  void store(const Kernels& ops, int position, const float* k, const float* v) {
    const auto block = static_cast<std::size_t>(table_[static_cast<std::size_t>(position / tokens_per_block_)]);
    std::uint8_t* k_block = bytes_.data() + block * 2 * half_block_;
    ops.store_kv(k, v, head_dim_, type_, k_block, k_block + half_block_, position % tokens_per_block_,
                 tokens_per_block_);
  }

  AttentionArgs args() const {
    AttentionArgs a;
    a.head_dim = head_dim_;
    a.kv_type = type_;
    a.k_base = bytes_.data();
    a.v_base = bytes_.data() + half_block_;
    a.block_stride = static_cast<std::ptrdiff_t>(2 * half_block_);
    a.block_table = table_.data();
    a.tokens_per_block = tokens_per_block_;
    return a;
  }

  std::uint8_t* data() { return bytes_.data(); }

 private:
  KvType type_;
  int head_dim_;
  int tokens_per_block_;
  std::size_t half_block_;
  AlignedBytes bytes_;
  std::vector<std::int32_t> table_;
};

/// Rounds to what float16 holds; test values stay in its normal range.
float to_half_and_back(float x) {
  const float step = std::ldexp(1.0f, std::max(std::ilogb(x == 0.0f ? 1e-5f : x), -14) - 10);
  return std::nearbyint(x / step) * step;
}

/// Rounds one token's K or V to what int8 holds.
void to_int8_and_back(float* x, int head_dim) {
  float largest = 0.0f;
  for (int d = 0; d < head_dim; ++d) largest = std::max(largest, std::abs(x[d]));
  const float scale = largest / 127;
  for (int d = 0; d < head_dim; ++d) x[d] = scale * std::nearbyint(x[d] / scale);
}

constexpr KvType kTypes[] = {KvType::kF32, KvType::kF16, KvType::kI8};

struct Case {
  int head_dim, group, position, window;
  float softcap;
  int tokens_per_block;
};

constexpr Case kCases[] = {
    {64, 3, 0, 0, 0.0f, 16},  {64, 1, 15, 0, 0.0f, 16},   {64, 2, 16, 0, 0.0f, 16},   {128, 4, 77, 0, 0.0f, 16},
    {8, 1, 40, 0, 0.0f, 16},  {24, 5, 40, 0, 50.0f, 32},  {256, 4, 99, 20, 0.0f, 16}, {40, 7, 63, 16, 0.0f, 64},
    {64, 8, 64, 1, 0.0f, 16}, {80, 2, 50, 500, 2.0f, 16}, {512, 1, 33, 17, 0.0f, 16}, {96, 6, 47, 5, 30.0f, 48},
};

/// Softmax(scale · q·k, capped) · v in double precision over the positions that the query sees.
std::vector<double> naive(const Case& c, const std::vector<float>& q, const std::vector<float>& k,
                          const std::vector<float>& v, float scale) {
  std::vector<double> out;
  const int first = c.window > 0 ? std::max(0, c.position - c.window + 1) : 0;
  for (int g = 0; g < c.group; ++g) {
    std::vector<double> scores;
    for (int t = first; t <= c.position; ++t) {
      double s = 0.0;
      for (int d = 0; d < c.head_dim; ++d) {
        s += double{q[static_cast<std::size_t>(g * c.head_dim + d)]} * k[static_cast<std::size_t>(t * c.head_dim + d)];
      }
      s *= scale;
      scores.push_back(c.softcap > 0.0f ? c.softcap * std::tanh(s / c.softcap) : s);
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    double total = 0.0;
    for (double& s : scores) total += s = std::exp(s - top);
    for (int d = 0; d < c.head_dim; ++d) {
      double x = 0.0;
      for (int t = first; t <= c.position; ++t) {
        x += scores[static_cast<std::size_t>(t - first)] * v[static_cast<std::size_t>(t * c.head_dim + d)];
      }
      out.push_back(x / total);
    }
  }
  return out;
}

class CpuAttention : public OnIsa {
 protected:
  struct Inputs {
    std::vector<float> q, k, v;
  };

  static Inputs inputs(const Case& c, KvType type, Random& random) {
    const auto kv = static_cast<std::size_t>((c.position + 1) * c.head_dim);
    Inputs in{normal(random, static_cast<std::size_t>(c.group * c.head_dim)), normal(random, kv), normal(random, kv)};
    if (type == KvType::kF16) {
      for (float& x : in.k) x = to_half_and_back(x);
      for (float& x : in.v) x = to_half_and_back(x);
    }
    for (int t = 0; type == KvType::kI8 && t <= c.position; ++t) {
      to_int8_and_back(in.k.data() + t * c.head_dim, c.head_dim);
      to_int8_and_back(in.v.data() + t * c.head_dim, c.head_dim);
    }
    return in;
  }

  /// A cache with exactly the positions that the query sees; everything else stays NaN.
  Cache filled(const Case& c, KvType type, const Inputs& in, Random& random) {
    Cache cache(type, c.head_dim, c.tokens_per_block, c.position / c.tokens_per_block + 3, random);
    for (int t = c.window > 0 ? std::max(0, c.position - c.window + 1) : 0; t <= c.position; ++t) {
      cache.store(ops(), t, in.k.data() + t * c.head_dim, in.v.data() + t * c.head_dim);
    }
    return cache;
  }

  std::vector<float> attend(const Case& c, const Cache& cache, const float* q, int group,
                            const Kernels* other = nullptr) {
    std::vector<float> out(static_cast<std::size_t>(group * c.head_dim), kNan);
    AttentionArgs a = cache.args();
    a.q = q;
    a.out = out.data();
    a.group = group;
    a.position = c.position;
    a.window = c.window;
    a.softcap = c.softcap;
    a.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    (other != nullptr ? *other : ops()).attention(a);
    return out;
  }
};
INSTANTIATE_ON_ISAS(CpuAttention);

TEST_P(CpuAttention, AgreesWithDoublePrecisionAndReadsNoUnusedSlot) {
  Random random(1);
  for (const KvType type : kTypes) {
    for (const Case& c : kCases) {
      SCOPED_TRACE("head_dim " + std::to_string(c.head_dim) + " position " + std::to_string(c.position));
      const Inputs in = inputs(c, type, random);
      const std::vector<float> got = attend(c, filled(c, type, in, random), in.q.data(), c.group);
      const std::vector<double> expected = naive(c, in.q, in.k, in.v, 1.0f / std::sqrt(static_cast<float>(c.head_dim)));
      const double tolerance = type == KvType::kI8 ? 1e-4 : 3e-6;  // int8: probabilities have 15 bits
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], tolerance) << i;
    }
  }
}

TEST_P(CpuAttention, AHeadDoesNotDependOnItsGroup) {
  Random random(2);
  for (const Case& c : kCases) {
    const Inputs in = inputs(c, KvType::kF16, random);
    const Cache cache = filled(c, KvType::kF16, in, random);
    const std::vector<float> together = attend(c, cache, in.q.data(), c.group);
    for (int g = 0; g < c.group; ++g) {
      const auto first = together.begin() + g * c.head_dim;
      EXPECT_TRUE(same_bits(attend(c, cache, in.q.data() + g * c.head_dim, 1), {first, first + c.head_dim}));
    }
  }
}

// The same history gives the same bits whatever the block size, the block order and what lies around it.
TEST_P(CpuAttention, DoesNotDependOnBlockSizeOrNeighbours) {
  Random random(3);
  for (Case c : kCases) {
    const Inputs in = inputs(c, KvType::kF32, random);
    const std::vector<float> expected = attend(c, filled(c, KvType::kF32, in, random), in.q.data(), c.group);
    for (const int tokens_per_block : {16, 64}) {
      c.tokens_per_block = tokens_per_block;
      Cache cache = filled(c, KvType::kF32, in, random);
      const Case longer{c.head_dim, c.group, c.position + 20, 0, c.softcap, tokens_per_block};
      const Inputs other = inputs(longer, KvType::kF32, random);
      for (int t = c.position + 1; t <= longer.position; ++t) {  // tokens after the query, as in a context chunk
        cache.store(ops(), t, other.k.data() + t * c.head_dim, other.v.data() + t * c.head_dim);
      }
      EXPECT_TRUE(same_bits(attend(c, cache, in.q.data(), c.group), expected)) << tokens_per_block;
    }
  }
}

TEST_P(CpuAttention, AgreesWithAvx2BitForBit) {
  Random random(7);
  for (const KvType type : kTypes) {
    for (const Case& c : kCases) {
      const Inputs in = inputs(c, type, random);
      const Cache cache = filled(c, type, in, random);
      EXPECT_TRUE(same_bits(attend(c, cache, in.q.data(), c.group),
                            attend(c, cache, in.q.data(), c.group, kernels_for("avx2"))));
    }
  }
}

TEST_P(CpuAttention, LargeScoresDoNotOverflow) {
  Random random(4);
  const Case c{64, 1, 20, 0, 0.0f, 16};
  Inputs in = inputs(c, KvType::kF32, random);
  for (float& x : in.q) x *= 1e4f;
  const std::vector<float> got = attend(c, filled(c, KvType::kF32, in, random), in.q.data(), 1);
  for (const float x : got) EXPECT_TRUE(std::isfinite(x));
}

TEST_P(CpuAttention, OneTokenReturnsItsValue) {
  Random random(5);
  const Case c{64, 2, 35, 1, 0.0f, 16};
  const Inputs in = inputs(c, KvType::kF32, random);
  const std::vector<float> got = attend(c, filled(c, KvType::kF32, in, random), in.q.data(), 2);
  for (int i = 0; i < 128; ++i)
    EXPECT_EQ(got[static_cast<std::size_t>(i)], in.v[static_cast<std::size_t>(35 * 64 + i % 64)]);
}

TEST_P(CpuAttention, Int8StoreTouchesItsSlotOnly) {
  Random random(8);
  for (const int slot : {0, 4, 5, 15}) {
    const int head_dim = 24, tokens = 16;
    std::vector<float> k = normal(random, head_dim), v = normal(random, head_dim);
    if (slot == 0) std::fill(v.begin(), v.end(), 0.0f);
    const auto bytes = kv_head_bytes(KvType::kI8, head_dim, tokens);
    AlignedBytes k_block(bytes), v_block(bytes);
    std::memset(k_block.data(), 0x5A, bytes);
    std::memset(v_block.data(), 0x5A, bytes);
    ops().store_kv(k.data(), v.data(), head_dim, KvType::kI8, k_block.data(), v_block.data(), slot, tokens);

    const auto check = [&](const AlignedBytes& block, const std::vector<float>& x, const auto& place) {
      float largest = 0.0f;
      for (const float value : x) largest = std::max(largest, std::abs(value));
      std::vector<std::uint8_t> expected(bytes, 0x5A);
      const float scale = largest / 127.0f;
      std::memcpy(expected.data() + head_dim * tokens + slot * 4, &scale, 4);
      for (int d = 0; d < head_dim; ++d) {
        const float code = scale == 0.0f ? 0.0f : std::nearbyint(x[static_cast<std::size_t>(d)] / scale);
        expected[static_cast<std::size_t>(place(d))] = static_cast<std::uint8_t>(static_cast<std::int8_t>(code));
      }
      EXPECT_EQ(std::vector<std::uint8_t>(block.data(), block.data() + bytes), expected) << "slot " << slot;
    };
    check(k_block, k, [&](int d) { return (d / 2 * tokens + slot) * 2 + d % 2; });
    check(v_block, v, [&](int d) { return (slot / 2 * head_dim + d) * 2 + slot % 2; });
  }
}

// A broken activation must show in the result, not vanish in a clamp.
TEST_P(CpuAttention, NanReachesTheResult) {
  Random random(9);
  const Case c{64, 2, 20, 0, 0.0f, 16};
  for (const KvType type : kTypes) {
    for (const int where : {0, 1, 2}) {
      Inputs in = inputs(c, type, random);
      (where == 0 ? in.q : where == 1 ? in.k : in.v)[40] = where == 0 ? -kNan : kNan;
      const std::vector<float> got = attend(c, filled(c, type, in, random), in.q.data(), c.group);
      EXPECT_TRUE(std::isnan(got[40])) << static_cast<int>(type) << " input " << where;
    }
  }
}

TEST_P(CpuAttention, StoreTouchesItsSlotOnly) {
  Random random(6);
  for (const KvType type : {KvType::kF32, KvType::kF16}) {
    const int head_dim = 24, tokens = 16, slot = 5;
    const std::size_t size = type == KvType::kF32 ? 4 : 2;
    const std::vector<float> k = normal(random, head_dim), v = normal(random, head_dim);
    AlignedBytes k_block(head_dim * tokens * size), v_block(head_dim * tokens * size);
    std::memset(k_block.data(), 0x5A, k_block.size());
    std::memset(v_block.data(), 0x5A, v_block.size());
    ops().store_kv(k.data(), v.data(), head_dim, type, k_block.data(), v_block.data(), slot, tokens);
    const auto element = [&](const AlignedBytes& block, int i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, block.data() + static_cast<std::size_t>(i) * size, size);
      return type == KvType::kF32 ? float_of(bits) : half_to_float(static_cast<std::uint16_t>(bits));
    };
    const auto untouched = [&](const AlignedBytes& block, int i) {
      const std::uint8_t* p = block.data() + static_cast<std::size_t>(i) * size;
      return std::all_of(p, p + size, [](std::uint8_t b) { return b == 0x5A; });
    };
    for (int d = 0; d < head_dim; ++d) {
      for (int t = 0; t < tokens; ++t) {
        const auto at = static_cast<std::size_t>(d);
        if (t != slot) {
          ASSERT_TRUE(untouched(k_block, d * tokens + t) && untouched(v_block, t * head_dim + d));
          continue;
        }
        EXPECT_EQ(element(k_block, d * tokens + t), type == KvType::kF32 ? k[at] : to_half_and_back(k[at]));
        EXPECT_EQ(element(v_block, t * head_dim + d), type == KvType::kF32 ? v[at] : to_half_and_back(v[at]));
      }
    }
  }
}

}  // namespace
}  // namespace aotllm::cpu::test
