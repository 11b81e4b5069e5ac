#include <array>
#include <cmath>
#include <limits>

#include "cpu_test_support.h"

namespace aotllm::cpu::test {
namespace {

class CpuE4m3 : public OnIsa {};
INSTANTIATE_ON_ISAS(CpuE4m3);

constexpr std::array<float, 5> kFactors = {1.0f, 1.125f, 1.25f, 1.5f, 1.75f};

float value_of(std::uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code < 0x80 ? magnitude : -magnitude;
}

/// The code nearest to x, of the two beside a middle the even one.
std::uint8_t nearest(float x) {
  const double magnitude = std::fabs(x);
  int best = 0;
  for (int code = 1; code < 0x7F; ++code) {
    const double further = std::fabs(value_of(static_cast<std::uint8_t>(code)) - magnitude);
    const double distance = std::fabs(value_of(static_cast<std::uint8_t>(best)) - magnitude);
    if (further < distance || (further == distance && code % 2 == 0)) best = code;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

TEST_P(CpuE4m3, CodesAreTheNearest) {
  std::vector<float> x = {0.0f, -0.0f, 448.0f, 448.1f, -464.0f, 1e30f, std::numeric_limits<float>::denorm_min()};
  for (int code = 0; code < 0x7E; ++code) {  // both neighbours of every middle, and it
    const float middle =
        (value_of(static_cast<std::uint8_t>(code)) + value_of(static_cast<std::uint8_t>(code + 1))) / 2;
    for (const float v : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 1e9f)}) {
      x.push_back(v);
      x.push_back(-v);
    }
  }
  const int k = static_cast<int>(x.size());
  std::vector<std::uint8_t> codes(x.size());
  ops().e4m3_codes(x.data(), k, 1.0f, codes.data());
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(codes[i], nearest(x[i])) << x[i];
}

TEST_P(CpuE4m3, TheScaleHasTheLeastSquaredError) {
  Random random(1);
  for (const int k : {1, 16, 33, 577}) {
    const std::vector<float> w = normal(random, static_cast<std::size_t>(k));
    float largest = 0.0f;
    for (const float v : w) largest = std::max(largest, std::fabs(v));
    EXPECT_EQ(ops().e4m3_scale(w.data(), k, kFactors.data(), 1), largest / 448.0f);
    double least = std::numeric_limits<double>::infinity();
    const auto error = [&](float scale) {
      double sum = 0.0;
      for (const float v : w) sum += std::pow(double{value_of(nearest(v / scale))} * scale - v, 2);
      return sum;
    };
    for (const float factor : kFactors) least = std::min(least, error(largest / 448.0f * factor));
    EXPECT_NEAR(error(ops().e4m3_scale(w.data(), k, kFactors.data(), kFactors.size())), least, 1e-5 * least + 1e-12)
        << k;
  }
}

TEST_P(CpuE4m3, EveryIsaFindsTheSame) {
  Random random(2);
  for (const int k : {1, 40, 4096}) {
    const std::vector<float> w = normal(random, static_cast<std::size_t>(k));
    const Kernels& best = kernels();
    const float scale = ops().e4m3_scale(w.data(), k, kFactors.data(), kFactors.size());
    EXPECT_EQ(scale, best.e4m3_scale(w.data(), k, kFactors.data(), kFactors.size()));
    std::vector<std::uint8_t> codes(w.size()), expected(w.size());
    ops().e4m3_codes(w.data(), k, scale, codes.data());
    best.e4m3_codes(w.data(), k, scale, expected.data());
    EXPECT_EQ(codes, expected);
  }
}

TEST_P(CpuE4m3, RowsWithoutAScale) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {kInf, -kInf, kNan, -kNan}) {
    for (const std::size_t place : {0, 16, 19}) {
      std::vector<float> w(20, 1.0f);
      w[place] = bad;
      EXPECT_FALSE(std::isfinite(ops().e4m3_scale(w.data(), 20, kFactors.data(), kFactors.size())));
    }
  }
  const std::vector<float> zeros = {0.0f, -0.0f, 0.0f};
  EXPECT_EQ(ops().e4m3_scale(zeros.data(), 3, kFactors.data(), kFactors.size()), 1.0f);
}

TEST_P(CpuE4m3, RowsAreWidened) {
  const std::vector<float> values = {0.0f, -1.5f, 65504.0f, 0x1p-24f, -0x1p-14f, 3.0f, 7.0f};
  const std::vector<std::uint16_t> halves = {0x0000, 0xBE00, 0x7BFF, 0x0001, 0x8400, 0x4200, 0x4700};
  std::vector<float> wide(45), expected(45);
  std::vector<std::uint16_t> f16(45), bf16(45);
  for (std::size_t i = 0; i < wide.size(); ++i) {
    f16[i] = halves[i % 7];
    expected[i] = values[i % 7];
    bf16[i] = static_cast<std::uint16_t>(0x3F80 + 97 * i);
  }
  for (const int k : {7, 16, 45}) {
    const auto size = static_cast<std::size_t>(k);
    const auto first = [&](const std::vector<float>& x) {
      return std::vector<float>(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(size));
    };
    ops().widen(FloatType::kF16, f16.data(), k, wide.data());
    EXPECT_EQ(first(wide), first(expected));
    ops().widen(FloatType::kF32, expected.data(), k, wide.data());
    EXPECT_EQ(first(wide), first(expected));
    ops().widen(FloatType::kBF16, bf16.data(), k, wide.data());
    for (std::size_t i = 0; i < size; ++i) {
      EXPECT_EQ(wide[i], __builtin_bit_cast(float, static_cast<std::uint32_t>(bf16[i]) << 16));
    }
  }
}

}  // namespace
}  // namespace aotllm::cpu::test
