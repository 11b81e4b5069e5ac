#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu_test_support.h"
#include "kv_rounding.h"

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
                bytes_.size());  // NaN in float32, -1 with a scale of NaN in codes
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

constexpr KvType kTypes[] = {KvType::kF32, KvType::kBF16, KvType::kI16, KvType::kI8};

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

  static Inputs inputs(const Case& c, Random& random) {
    const auto kv = static_cast<std::size_t>((c.position + 1) * c.head_dim);
    return {normal(random, static_cast<std::size_t>(c.group * c.head_dim)), normal(random, kv), normal(random, kv)};
  }

  /// What the cache holds of them.
  static Inputs rounded(const Case& c, KvType type, Inputs in) {
    for (int t = 0; type != KvType::kF32 && t <= c.position; ++t) {
      float* k = in.k.data() + t * c.head_dim;
      float* v = in.v.data() + t * c.head_dim;
      if (type == KvType::kBF16) {
        to_bf16_and_back(k, c.head_dim);
        to_bf16_and_back(v, c.head_dim);
        continue;
      }
      const Scales scales = scales_of(type, k, v, c.head_dim);
      to_codes_and_back(k, c.head_dim, scales.k);
      to_codes_and_back(v, c.head_dim, scales.v);
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
    a.row_stride = group * c.head_dim;
    a.heads = group;
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
      const Inputs in = inputs(c, random);
      const std::vector<float> got = attend(c, filled(c, type, in, random), in.q.data(), c.group);
      const Inputs held = rounded(c, type, in);
      const std::vector<double> expected =
          naive(c, held.q, held.k, held.v, 1.0f / std::sqrt(static_cast<float>(c.head_dim)));
      const bool is_exact = type == KvType::kF32 || type == KvType::kBF16;
      const double tolerance = is_exact ? 3e-6 : 4e-4;  // with codes, q and weights are codes, too
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], tolerance) << i;
    }
  }
}

// Codes of K and V, of q and of weights together: as close as a float16 cache alone would be.
TEST_P(CpuAttention, Int16IsAsGoodAsFloat16) {
  Random random(10);
  for (const float outlier : {1.0f, 100.0f}) {  // one dimension of q and k far above the others, as biases make it
    const Case c{64, 3, 700, 0, 0.0f, 16};
    Inputs in = inputs(c, random);
    for (std::size_t i = 5; i < in.k.size(); i += 64) in.k[i] = outlier * (1.0f + 0.01f * in.k[i]);
    for (std::size_t i = 5; i < in.q.size(); i += 64) in.q[i] *= outlier;
    const float scale = 1.0f / 8.0f / outlier;
    Inputs halved = in;
    for (auto* x : {&halved.k, &halved.v}) {
      for (float& value : *x) {
        const float step = std::ldexp(1.0f, std::max(std::ilogb(value), -14) - 10);
        value = std::nearbyint(value / step) * step;
      }
    }
    const std::vector<double> exact = naive(c, in.q, in.k, in.v, scale);
    const std::vector<double> with_halves = naive(c, halved.q, halved.k, halved.v, scale);
    const Cache cache = filled(c, KvType::kI16, in, random);
    std::vector<float> got(exact.size());
    AttentionArgs a = cache.args();
    a.q = in.q.data();
    a.out = got.data();
    a.heads = c.group;
    a.position = c.position;
    a.scale = scale;
    ops().attention(a);
    double error = 0, half_error = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      error += std::pow(got[i] - exact[i], 2);
      half_error += std::pow(with_halves[i] - exact[i], 2);
    }
    EXPECT_LT(std::sqrt(error), 1.5 * std::sqrt(half_error)) << "outlier " << outlier;
  }
}

TEST_P(CpuAttention, AHeadDoesNotDependOnItsGroup) {
  Random random(2);
  for (const KvType type : kTypes) {
    for (const Case& c : kCases) {
      const Inputs in = inputs(c, random);
      const Cache cache = filled(c, type, in, random);
      const std::vector<float> together = attend(c, cache, in.q.data(), c.group);
      for (int g = 0; g < c.group; ++g) {
        const auto first = together.begin() + g * c.head_dim;
        EXPECT_TRUE(same_bits(attend(c, cache, in.q.data() + g * c.head_dim, 1), {first, first + c.head_dim}));
      }
    }
  }
}

/// Rows of one sequence: the last `rows` of a context of `end` positions.
struct Tile {
  int rows, heads, head_dim, end, window;
  float softcap;
};
constexpr Tile kTiles[] = {
    {2, 3, 64, 2, 0, 0.0f},     {21, 3, 64, 64, 0, 0.0f},    {8, 8, 64, 70, 0, 0.0f},     {13, 1, 64, 300, 0, 0.0f},
    {16, 2, 24, 33, 5, 0.0f},   {9, 7, 40, 530, 0, 3.0f},    {5, 3, 128, 600, 300, 0.0f}, {8, 1, 512, 258, 0, 0.0f},
    {60, 1, 64, 4150, 0, 0.0f}, {30, 2, 64, 300, 256, 0.0f}, {64, 1, 8, 64, 1, 0.0f},     {3, 5, 80, 4500, 4096, 0.0f},
};

/// A row has the same bits alone, with its neighbours in one call, and put together from ranges, and none depends on
/// what is stored behind it.
TEST_P(CpuAttention, ARowDoesNotDependOnItsTileOrOnHowItsRangesAreComputed) {
  Random random(11);
  for (const KvType type : kTypes) {
    for (const Tile& t : kTiles) {
      SCOPED_TRACE("rows " + std::to_string(t.rows) + " end " + std::to_string(t.end));
      const Case last{t.head_dim, t.heads, t.end - 1, 0, t.softcap, 32};
      Inputs in = inputs(last, random);
      const Case lowest{t.head_dim, t.heads, t.end - 1, t.window + (t.window > 0 ? t.rows - 1 : 0), t.softcap, 32};
      const Cache cache = filled(lowest, type, in, random);
      const int vectors = t.rows * t.heads;
      ASSERT_LE(vectors, max_attention_vectors(t.head_dim));
      in.q = normal(random, static_cast<std::size_t>(vectors * t.head_dim));
      std::vector<float> together(in.q.size(), kNan), merged(in.q.size(), kNan);
      AttentionArgs a = cache.args();
      a.q = in.q.data();
      a.row_stride = t.heads * t.head_dim;
      a.rows = t.rows;
      a.heads = t.heads;
      a.position = t.end - t.rows;
      a.window = t.window;
      a.softcap = t.softcap;
      a.scale = 0.3f;
      a.out = together.data();
      ops().attention(a);

      std::vector<float> partials;
      const auto size = static_cast<std::size_t>(vectors * attention_partial_floats(t.head_dim));
      for (int at = a.range_of(a.first_seen(a.position)); at < t.end; at = next_kv_range(at, t.window)) {
        std::vector<float> range(size, kNan);
        ops().attention_range(a, at, range.data());
        partials.insert(partials.end(), range.begin(), range.end());
      }
      a.out = merged.data();
      ops().merge_attention(a, partials.data());
      EXPECT_TRUE(same_bits(merged, together));
      std::vector<float> on_avx2(in.q.size(), kNan);
      a.out = on_avx2.data();
      kernels_for("avx2")->attention(a);
      EXPECT_TRUE(same_bits(on_avx2, together));

      std::vector<float> alone(in.q.size(), kNan);
      const AttentionArgs all = a;  // any call may follow: what is fetched for it changes nothing
      a.rows = 1;
      for (int row = 0; row < t.rows; ++row) {
        a.next = row % 2 == 0 ? &all : nullptr;
        a.q = in.q.data() + row * a.row_stride;
        a.out = alone.data() + row * a.row_stride;
        ops().attention(a);
        ++a.position;
      }
      EXPECT_TRUE(same_bits(alone, together));
      EXPECT_TRUE(std::all_of(together.begin(), together.end(), [](float x) { return std::isfinite(x); }));
    }
  }
}

TEST(KvRanges, CoverPositionsInOrderAndStayFew) {
  for (const int window : {0, 1, 100, 4096, 5000, 70000}) {
    int count = 0;
    for (int at = 0; at < 1 << 20; at = next_kv_range(at, window), ++count) {
      const int length = kv_range_length(at, window);
      ASSERT_EQ(at % length, 0);
      ASSERT_EQ(kv_range_length(at + length - 1, window), length) << at;
    }
    const int reach = window > 0 ? window : 1 << 20;
    EXPECT_LE(reach / kv_range_length(1 << 20, window), 16) << "ranges of a window";
    if (window == 0) {
      EXPECT_LT(count, 90);
    }
  }
  EXPECT_EQ(kv_range_length(4095, 0), 256);
  EXPECT_EQ(kv_range_length(4096, 0), 512);
  EXPECT_EQ(kv_range_length(100000, 300), 256);
}

// The same history gives the same bits whatever the block size, the block order and what lies around it.
TEST_P(CpuAttention, DoesNotDependOnBlockSizeOrNeighbours) {
  Random random(3);
  for (Case c : kCases)
    for (const KvType type : kTypes) {
      const Inputs in = inputs(c, random);
      const std::vector<float> expected = attend(c, filled(c, type, in, random), in.q.data(), c.group);
      for (const int tokens_per_block : {16, 64}) {
        c.tokens_per_block = tokens_per_block;
        Cache cache = filled(c, type, in, random);
        const Case longer{c.head_dim, c.group, c.position + 20, 0, c.softcap, tokens_per_block};
        const Inputs other = inputs(longer, random);
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
      const Inputs in = inputs(c, random);
      const Cache cache = filled(c, type, in, random);
      EXPECT_TRUE(same_bits(attend(c, cache, in.q.data(), c.group),
                            attend(c, cache, in.q.data(), c.group, kernels_for("avx2"))));
    }
  }
}

TEST_P(CpuAttention, LargeScoresDoNotOverflow) {
  Random random(4);
  const Case c{64, 1, 20, 0, 0.0f, 16};
  Inputs in = inputs(c, random);
  for (float& x : in.q) x *= 1e4f;
  const std::vector<float> got = attend(c, filled(c, KvType::kF32, in, random), in.q.data(), 1);
  for (const float x : got) EXPECT_TRUE(std::isfinite(x));
}

TEST_P(CpuAttention, OneTokenReturnsItsValue) {
  Random random(5);
  const Case c{64, 2, 35, 1, 0.0f, 16};
  const Inputs in = inputs(c, random);
  const std::vector<float> got = attend(c, filled(c, KvType::kF32, in, random), in.q.data(), 2);
  for (int i = 0; i < 128; ++i)
    EXPECT_EQ(got[static_cast<std::size_t>(i)], in.v[static_cast<std::size_t>(35 * 64 + i % 64)]);
}

// Sums of codes stay inside 32 bits for the vectors that make them largest: all equal, one alone, and a sign against
// the other's.
TEST_P(CpuAttention, CodesDoNotOverflow) {
  for (const KvType type : kCodeTypes) {
    for (const int head_dim : {8, 64, 512}) {
      for (const int shape : {0, 1, 2}) {
        const Case c{head_dim, 1, 63, 0, 0.0f, 16};
        Random random(12);
        Inputs in = inputs(c, random);
        for (int t = 0; t <= c.position; ++t) {
          for (int d = 0; d < head_dim; ++d) {
            const float x = shape == 1 && d > 0 ? 0.0f : shape == 2 && d % 2 == 1 ? -1.0f : 1.0f;
            in.q[static_cast<std::size_t>(d)] = x;
            in.k[static_cast<std::size_t>(t * head_dim + d)] = x * static_cast<float>(t < 63 ? 1 : 2);
            in.v[static_cast<std::size_t>(t * head_dim + d)] = x;
          }
        }
        const std::vector<double> expected = naive(c, in.q, in.k, in.v, 1.0f / std::sqrt(static_cast<float>(head_dim)));
        const std::vector<float> got = attend(c, filled(c, type, in, random), in.q.data(), 1);
        for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 3e-4) << head_dim << ' ' << shape;
      }
    }
  }
}

// A broken activation must show in the result, not vanish in a clamp.
TEST_P(CpuAttention, NanReachesTheResult) {
  Random random(9);
  const Case c{64, 2, 20, 0, 0.0f, 16};
  for (const KvType type : kTypes) {
    for (const int where : {0, 1, 2}) {
      Inputs in = inputs(c, random);
      (where == 0 ? in.q : where == 1 ? in.k : in.v)[40] = where == 0 ? -kNan : kNan;
      const std::vector<float> got = attend(c, filled(c, type, in, random), in.q.data(), c.group);
      EXPECT_TRUE(std::isnan(got[40])) << static_cast<int>(type) << " input " << where;
    }
  }
}

}  // namespace
}  // namespace aotllm::cpu::test
