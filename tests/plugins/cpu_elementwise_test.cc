#include <cmath>
#include <limits>

#include "cpu_test_support.h"

namespace aotllm::cpu::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double relative_error(double got, double expected) {
  return got == expected ? 0.0 : std::fabs(got - expected) / std::max(std::fabs(expected), 1e-37);
}

class CpuElementwise : public OnIsa {};
INSTANTIATE_ON_ISAS(CpuElementwise);

TEST_P(CpuElementwise, RmsNormAgreesWithDoublePrecision) {
  Random random(1);
  for (const int n : {1, 8, 16, 17, 64, 577, 4096}) {
    std::vector<float> x = normal(random, static_cast<std::size_t>(n), 3.0f);
    const std::vector<float> w = normal(random, x.size());
    double squares = 0.0;
    for (const float v : x) squares += double{v} * v;
    const double factor = 1.0 / std::sqrt(squares / n + 1e-5);
    std::vector<float> y(x.size());
    ops().rms_norm(x.data(), w.data(), 1e-5f, n, y.data());
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_LT(relative_error(y[i], x[i] * factor * w[i]), 2e-6) << n;
    ops().rms_norm(x.data(), w.data(), 1e-5f, n, x.data());
    EXPECT_TRUE(same_bits(x, y)) << "in place, n " << n;
  }
}

TEST_P(CpuElementwise, RmsNormOfZerosIsZero) {
  std::vector<float> x(20, 0.0f), w(20, 1.0f), y(20, 5.0f);
  ops().rms_norm(x.data(), w.data(), 1e-6f, 20, y.data());
  EXPECT_EQ(y, std::vector<float>(20, 0.0f));
}

TEST_P(CpuElementwise, RopeRotatesPairs) {
  Random random(2);
  for (const int half : {1, 4, 16, 20, 32, 64}) {
    const auto size = static_cast<std::size_t>(half);
    std::vector<float> x = normal(random, 2 * size);
    const std::vector<float> before = x;
    std::vector<float> cos, sin;
    for (int i = 0; i < half; ++i) {
      cos.push_back(std::cos(0.1f * static_cast<float>(i)));
      sin.push_back(std::sin(0.1f * static_cast<float>(i)));
    }
    ops().rope(x.data(), cos.data(), sin.data(), half);
    for (std::size_t i = 0; i < size; ++i) {
      const double re = before[i], im = before[i + size];
      EXPECT_NEAR(x[i], re * cos[i] - im * sin[i], 1e-6);
      EXPECT_NEAR(x[i + size], im * cos[i] + re * sin[i], 1e-6);
    }
  }
}

/// Every binade of both signs, dense around 0, and the largest values.
std::vector<float> probes() {
  std::vector<float> x = {0.0f, -0.0f, 1e-45f, -1e-45f, 88.0f, -88.0f, 3e38f, -3e38f};
  Random random(3);
  for (int exponent = -40; exponent < 8; ++exponent) {
    for (float v : normal(random, 40)) x.push_back(std::ldexp(v, exponent));
  }
  return x;
}

double silu(double x) {
  return x / (1.0 + std::exp(-x));
}
double gelu_tanh(double x) {
  const double u = std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
  return x / (1.0 + std::exp(-2.0 * u));
}

TEST_P(CpuElementwise, ActivationsAgreeWithDoublePrecision) {
  const std::vector<float> gate = probes();
  const std::vector<float> up(gate.size(), 1.0f);
  std::vector<float> out(gate.size());
  for (const auto& [act, reference] :
       {std::pair{Activation::kSilu, &silu}, std::pair{Activation::kGeluTanh, &gelu_tanh}}) {
    ops().act_mul(act, gate.data(), up.data(), static_cast<int>(gate.size()), out.data());
    for (std::size_t i = 0; i < gate.size(); ++i) {
      const double expected = reference(gate[i]);
      // GELU rounds the argument of e^-2u, and e^ magnifies that by the argument.
      const double u = act == Activation::kSilu ? 0.0 : std::min(90.0, std::fabs(std::pow(double{gate[i]}, 3)) + 2.0);
      const double limit = 5e-7 + 5e-7 * u;
      if (std::fabs(expected) > 1e-30) {
        EXPECT_LT(relative_error(out[i], expected), limit) << gate[i];
      } else {
        EXPECT_NEAR(out[i], expected, 1e-30) << gate[i];
      }
    }
  }
}

TEST_P(CpuElementwise, ActivationsHaveTheirLimits) {
  const std::vector<float> gate = {kInf, -kInf, 0.0f, kNan, -1e30f};
  const std::vector<float> up(gate.size(), 2.0f);
  for (const Activation act : {Activation::kSilu, Activation::kGeluTanh}) {
    std::vector<float> out(gate.size());
    ops().act_mul(act, gate.data(), up.data(), static_cast<int>(gate.size()), out.data());
    EXPECT_EQ(out[0], kInf);
    EXPECT_EQ(out[1], 0.0f);
    EXPECT_EQ(out[2], 0.0f);
    EXPECT_TRUE(std::isnan(out[3]));
    EXPECT_EQ(out[4], 0.0f);
  }
}

TEST_P(CpuElementwise, SoftcapAgreesWithDoublePrecision) {
  for (const float cap : {1.0f, 30.0f, 50.0f}) {
    const std::vector<float> x = probes();
    std::vector<float> y = x;
    ops().softcap(y.data(), static_cast<int>(y.size()), cap);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = cap * std::tanh(static_cast<double>(x[i]) / cap);
      ASSERT_TRUE(relative_error(y[i], expected) < 5e-7 || std::fabs(x[i]) < 1e-36) << x[i] << " cap " << cap;
    }
  }
  std::vector<float> limits = {kInf, -kInf, kNan, -0.0f};
  ops().softcap(limits.data(), 4, 30.0f);
  EXPECT_TRUE(same_bits(limits, {30.0f, -30.0f, kNan, -0.0f}));
}

TEST_P(CpuElementwise, AddAndTails) {
  for (int n = 0; n <= 40; ++n) {
    Random random(static_cast<unsigned>(n));
    const auto size = static_cast<std::size_t>(n);
    std::vector<float> a = normal(random, size), expected(size + 4, 9.0f);
    const std::vector<float> b = normal(random, size);
    for (std::size_t i = 0; i < size; ++i) expected[i] = a[i] + b[i];
    a.resize(size + 4, 9.0f);
    ops().add(a.data(), b.data(), n, a.data());
    EXPECT_TRUE(same_bits(a, expected)) << n;
  }
}

TEST_P(CpuElementwise, AddScaledRoundsOnceAndKeepsToItsLength) {
  for (int n = 0; n <= 40; ++n) {
    Random random(static_cast<unsigned>(n));
    const auto size = static_cast<std::size_t>(n);
    std::vector<float> a = normal(random, size), expected(size + 4, 9.0f);
    const std::vector<float> b = normal(random, size);
    for (std::size_t i = 0; i < size; ++i) expected[i] = std::fma(b[i], 0.3f, a[i]);
    a.resize(size + 4, 9.0f);
    ops().add_scaled(a.data(), 0.3f, b.data(), n, a.data());
    EXPECT_TRUE(same_bits(a, expected)) << n;
  }
}

TEST_P(CpuElementwise, DotRowsAgreesWithDoublePrecision) {
  Random random(5);
  for (const int k : {1, 15, 16, 40, 577}) {
    const std::vector<float> a = normal(random, 11 * static_cast<std::size_t>(k));
    const std::vector<float> x = normal(random, static_cast<std::size_t>(k));
    std::vector<float> all(12, 9.0f);
    ops().dot_rows(a.data(), x.data(), 11, k, all.data());
    for (std::size_t i = 0; i < 11; ++i) {
      double expected = 0.0;
      for (std::size_t c = 0; c < x.size(); ++c) expected += double{a[i * x.size() + c]} * x[c];
      EXPECT_NEAR(all[i], expected, 2e-5) << "k " << k << ", row " << i;
    }
    EXPECT_EQ(all[11], 9.0f) << "written past the last row";
    for (int begin = 0; begin < 11; ++begin) {
      std::vector<float> part(static_cast<std::size_t>(11 - begin));
      ops().dot_rows(a.data() + begin * k, x.data(), 11 - begin, k, part.data());
      EXPECT_TRUE(same_bits(part, {all.begin() + begin, all.end() - 1})) << "a row's sum depends on its neighbours";
    }
  }
}

// `OnIsa` compares with oracles up to rounding; between ISAs not even rounding may differ.
TEST_P(CpuElementwise, AgreesWithAvx2BitForBit) {
  const Kernels& avx2 = *kernels_for("avx2");
  const std::vector<float> x = probes();
  const int n = static_cast<int>(x.size());
  const auto both = [&](auto run) {
    std::vector<float> got = x, expected = x;
    run(ops(), got.data());
    run(avx2, expected.data());
    return same_bits(got, expected);
  };
  EXPECT_TRUE(both([&](const Kernels& k, float* y) { k.act_mul(Activation::kSilu, x.data(), x.data(), n, y); }));
  EXPECT_TRUE(both([&](const Kernels& k, float* y) { k.act_mul(Activation::kGeluTanh, x.data(), x.data(), n, y); }));
  EXPECT_TRUE(both([&](const Kernels& k, float* y) { k.softcap(y, n, 3.0f); }));
  EXPECT_TRUE(both([&](const Kernels& k, float* y) { k.rms_norm(x.data() + 8, x.data(), 1e-5f, n - 8, y); }));
  EXPECT_TRUE(both([&](const Kernels& k, float* y) { k.dot_rows(x.data() + 8, x.data() + 9, 5, n / 8, y); }));
  EXPECT_TRUE(both([&](const Kernels& k, float* y) { k.rope(y, x.data(), x.data() + 1, n / 2); }));
}

// ---- quantize

/// k / 32 blocks and the row's scale.
std::vector<ActivationBlock> quantize(const Kernels& ops, const std::vector<float>& x) {
  std::vector<ActivationBlock> blocks(x.size() / 32 + 1);
  ops.quantize(x.data(), static_cast<int>(x.size()), blocks.data());
  return blocks;
}

TEST_P(CpuElementwise, QuantizeRoundsHalfToEven) {
  std::vector<float> x(64, 0.0f);
  const float probe[] = {127.0f, -127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 126.5f, 0.49f};
  const int expected[] = {127, -127, 0, 2, 2, 0, -2, -2, 126, 0};
  std::copy(std::begin(probe), std::end(probe), x.begin());
  std::vector<ActivationBlock> blocks = quantize(ops(), x);
  for (std::size_t i = 0; i < std::size(probe); ++i) EXPECT_EQ(blocks[0].q[i], expected[i]) << probe[i];
  EXPECT_EQ(row_scale(blocks.data(), 64), 1.0f / kLargestFactor);
  EXPECT_EQ(blocks[0].scales[0], kLargestFactor);
  EXPECT_EQ(blocks[0].factors[0], kLargestFactor);
  EXPECT_EQ(blocks[0].sum, 126.0f * kLargestFactor);
  EXPECT_EQ(blocks[0].minus_8_sums[0], -8 * 126);
  EXPECT_EQ(blocks[0].minus_128_sums[0], -128 * 126);
  for (const float scale : {blocks[0].scales[1], blocks[1].scales[0], blocks[1].scales[1]}) EXPECT_EQ(scale, 0.0f);
}

float largest_magnitude(const float* x, std::size_t n) {
  float largest = 0.0f;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

/// The groups of 16 in x, one by one, by the definition in docs/engine_format.md.
void expect_quantized(const std::vector<float>& x, std::vector<ActivationBlock> blocks) {
  const float top = largest_magnitude(x.data(), x.size());
  const bool zeros = top < 0x1p-100f;
  ASSERT_EQ(row_scale(blocks.data(), static_cast<int>(x.size())), zeros ? 0.0f : top / (127 * 16384.0f));
  for (std::size_t b = 0; b < x.size() / 32; ++b) {
    const ActivationBlock& block = blocks[b];
    int sums[2] = {};
    for (std::size_t half = 0; half < 2; ++half) {
      const float* group = x.data() + 32 * b + 16 * half;
      const float largest = largest_magnitude(group, 16);
      const float factor = zeros ? 0.0f : std::nearbyint(std::fma(largest, 16384.0f / top, 0.49f));
      ASSERT_EQ(block.scales[half], factor);
      ASSERT_EQ(block.factors[half], static_cast<int>(factor));
      for (std::size_t i = 0; i < 16; ++i) {
        const float code = factor == 0.0f ? 0.0f : std::nearbyint(group[i] * (127 * 16384.0f / top / factor));
        ASSERT_EQ(block.q[16 * half + i], static_cast<int>(std::clamp(code, -127.0f, 127.0f)));
        sums[half] += block.q[16 * half + i];
      }
      ASSERT_EQ(block.minus_8_sums[half], -8 * sums[half]);
      ASSERT_EQ(block.minus_128_sums[half], -128 * sums[half]);
    }
    ASSERT_EQ(block.sum, static_cast<float>(block.factors[0] * sums[0] + block.factors[1] * sums[1]));
  }
}

TEST_P(CpuElementwise, QuantizeAgreesWithTheDefinition) {
  Random random(4);
  for (const float magnitude : {1e-38f, 0x1p-101f, 1e-3f, 1.0f, 1e4f, 1e37f}) {
    const std::vector<float> x = normal(random, 320, magnitude);
    expect_quantized(x, quantize(ops(), x));
  }
}

// Groups from as large as the row's largest down to nothing beside it: within half a code of the group's own range, and
// of what a factor of 1 can tell, of which a hundredth of that range is cut off.
TEST_P(CpuElementwise, QuantizeKeepsEachGroupsPrecision) {
  Random random(7);
  std::vector<float> x = normal(random, 16 * 40, 1.0f);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::ldexp(x[i], -static_cast<int>(i / 16));
  std::vector<ActivationBlock> blocks = quantize(ops(), x);
  const float unit = row_scale(blocks.data(), static_cast<int>(x.size()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const ActivationBlock& block = blocks[i / 32];
    const float got = unit * block.scales[i % 32 / 16] * block.q[i % 32];
    const float largest = largest_magnitude(x.data() + i / 16 * 16, 16);
    ASSERT_NEAR(got, x[i], 0.5f * (largest / 127 + unit) + 1.28f * unit) << i;
  }
}

TEST_P(CpuElementwise, QuantizeKeepsCodesInRangeForAnyInput) {
  for (const float odd : {kNan, kInf, -kInf, 1e-45f, -1e-44f, 3.4e38f}) {
    std::vector<float> x(32, 1e-45f);
    x[1] = odd;
    std::vector<ActivationBlock> blocks = quantize(ops(), x);
    for (const std::int8_t q : blocks[0].q) EXPECT_GE(q, -127) << odd;
    EXPECT_EQ(std::isfinite(row_scale(blocks.data(), 32)), std::isfinite(odd)) << odd;
  }
}

TEST_P(CpuElementwise, NormAndQuantizeInOnePassAreTheSame) {
  Random random(6);
  for (const int n : {32, 64, 576, 4096}) {
    const std::vector<float> x = normal(random, static_cast<std::size_t>(n), 3.0f);
    const std::vector<float> w = normal(random, static_cast<std::size_t>(n));
    std::vector<float> normed(x.size());
    ops().rms_norm(x.data(), w.data(), 1e-5f, n, normed.data());
    const std::vector<ActivationBlock> expected = quantize(ops(), normed);
    std::vector<ActivationBlock> got(expected.size());
    ops().rms_norm_quantize(x.data(), w.data(), 1e-5f, n, got.data());
    EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(ActivationBlock)), 0) << n;
  }
}

}  // namespace
}  // namespace aotllm::cpu::test
