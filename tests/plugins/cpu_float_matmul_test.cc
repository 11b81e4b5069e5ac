#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "float_matrix.h"

namespace aotllm::cpu::test {
namespace {

struct Shape {
  int n, k, rows;
};

class CpuFloatMatmul : public OnIsa {
 protected:
  std::vector<float> run(const Segment& w, const Activations& a, int rows) {
    std::vector<float> y(static_cast<std::size_t>(rows * w.n), -1.0f);
    ops().matmul(w, a, rows, 0, (w.n + 15) / 16, y.data(), w.n);
    return y;
  }
};
INSTANTIATE_ON_ISAS(CpuFloatMatmul);

// Row counts around every tile size, panels that fill a group and that do not, odd k.
constexpr Shape kFloatShapes[] = {{1, 1, 1},    {16, 7, 2},   {100, 33, 1}, {100, 20, 2}, {40, 64, 3},
                                  {17, 5, 4},   {70, 9, 5},   {64, 31, 6},  {64, 32, 7},  {53, 70, 8},
                                  {130, 19, 9}, {70, 40, 14}, {33, 6, 33}};

TEST_P(CpuFloatMatmul, F32AndF16AreOneFmaChainInAscendingK) {
  Random random(5);
  for (const Format format : {Format::kF32, Format::kF16}) {
    for (const Shape& s : kFloatShapes) {
      const FloatMatrix w(format, s.n, s.k, random);
      const std::ptrdiff_t stride = s.k + 3;
      const std::vector<float> x = normal(random, static_cast<std::size_t>(s.rows * stride));
      Activations a;
      a.x = x.data();
      a.x_stride = stride;
      std::vector<float> expected;
      for (int row = 0; row < s.rows; ++row) {
        for (int n = 0; n < s.n; ++n) {
          float acc = 0.0f;
          for (int k = 0; k < s.k; ++k) {
            acc = std::fma(w.values[static_cast<std::size_t>(n * s.k + k)],
                           x[static_cast<std::size_t>(row * stride + k)], acc);
          }
          expected.push_back(acc);
        }
      }
      EXPECT_TRUE(same_bits(run(w.segment(), a, s.rows), expected))
          << format_name(format) << " n " << s.n << " k " << s.k << " rows " << s.rows;
    }
  }
}

/// Rows rounded to bfloat16, from the definition: the neighbour that is nearer, of two as near the even one.
struct Bf16Rows {
  Bf16Rows(const std::vector<float>& x, int rows, int k)
      : stride(bf16_stride(k)), values(x), bits(static_cast<std::size_t>(rows * stride), 0) {
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < k; ++i) {
        float& v = values[static_cast<std::size_t>(row * k + i)];
        const std::uint32_t below = bits_of(v) >> 16;
        const std::uint32_t rest = bits_of(v) & 0xFFFF;
        const std::uint32_t up = rest > 0x8000 || (rest == 0x8000 && below % 2 == 1) ? 1 : 0;
        bits[static_cast<std::size_t>(row * stride + i)] = static_cast<std::uint16_t>(below + up);
        v = float_of((below + up) << 16);
      }
    }
  }
  Activations activations() const {
    Activations a;
    a.bf16 = bits.data();
    return a;
  }

  std::ptrdiff_t stride;
  std::vector<float> values;  ///< [rows, k]
  std::vector<std::uint16_t> bits;
};

__extension__ using Quad = __float128;

float without_subnormal(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

/// acc + w · x, rounded once; subnormals are zeros, and a sum is one if it is below 2^-126 after rounding to 24 bits.
float add_product(float acc, float w, float x) {
  const Quad exact = Quad{without_subnormal(acc)} + Quad{without_subnormal(w)} * Quad{without_subnormal(x)};
  const Quad magnitude = exact < 0 ? -exact : exact;
  if (magnitude != 0 && magnitude < Quad{0x1p-126} * (1 - Quad{0x1p-25})) return exact < 0 ? -0.0f : 0.0f;
  return static_cast<float>(exact);
}

/// One output of bf16 weights.
class Bf16Dot {
 public:
  Bf16Dot(const FloatMatrix& w, const Bf16Rows& x, int row, int n) : w_(w), x_(x), row_(row), n_(n) {}

  /// Pairs in ascending order, of each the second column first.
  float by_pairs() const {
    float acc = 0.0f;
    for (int i = 0; i < w_.k; i += 2) acc = add_column(add_column(acc, i + 1), i);
    return acc;
  }

  /// As AMX: per 32 columns a chain over the even and one over the odd ones, their sum, the sum of sums.
  float by_tiles() const {
    float acc = 0.0f;
    for (int i = 0; i < w_.k; i += 32) {
      float even = 0.0f;
      float odd = 0.0f;
      for (int j = i; j < i + 32; j += 2) {
        even = add_column(even, j);
        odd = add_column(odd, j + 1);
      }
      acc = add_product(acc, add_product(even, odd, 1.0f), 1.0f);
    }
    return acc;
  }

 private:
  float add_column(float acc, int i) const {
    if (i >= w_.k) return add_product(acc, 0.0f, 0.0f);
    return add_product(acc, w_.values[static_cast<std::size_t>(n_ * w_.k + i)],
                       x_.values[static_cast<std::size_t>(row_ * w_.k + i)]);
  }

  const FloatMatrix& w_;
  const Bf16Rows& x_;
  int row_;
  int n_;
};

// With the largest scale sums overflow, with the least ones they are mostly subnormal.
TEST_P(CpuFloatMatmul, Bf16FollowsTheDocumentedOrderWithoutSubnormals) {
  const bool tiles = std::string(GetParam()) == "amx";
  Random random(8);
  for (const float scale : {1.0f, 0x1p-124f, 0x1p-127f, 0x1p126f}) {
    for (const Shape& s : kFloatShapes) {
      const FloatMatrix w(Format::kBF16, s.n, s.k, random);
      const Bf16Rows x(normal(random, static_cast<std::size_t>(s.rows * s.k), scale), s.rows, s.k);
      std::vector<float> expected;
      for (int row = 0; row < s.rows; ++row) {
        for (int n = 0; n < s.n; ++n) {
          const Bf16Dot dot(w, x, row, n);
          expected.push_back(tiles ? dot.by_tiles() : dot.by_pairs());
        }
      }
      EXPECT_TRUE(same_bits(run(w.segment(), x.activations(), s.rows), expected))
          << "scale " << scale << " n " << s.n << " k " << s.k << " rows " << s.rows;
    }
  }
}

// Also: nothing is written beyond column n.
TEST_P(CpuFloatMatmul, FloatFormatsTakeAnyPanelRange) {
  Random random(11);
  for (const Format format : kFloatFormats) {
    const int n = 75, k = 70, rows = 19, panels = 5;
    const FloatMatrix w(format, n, k, random);
    const std::vector<float> x = normal(random, static_cast<std::size_t>(rows * k));
    const Bf16Rows rounded(x, rows, k);
    Activations a = rounded.activations();
    a.x = x.data();
    a.x_stride = k;
    const std::vector<float> whole = run(w.segment(), a, rows);
    for (int begin = 0; begin < panels; ++begin) {
      for (int end = begin + 1; end <= panels; ++end) {
        const int columns = std::min(n, 16 * end) - 16 * begin;
        const int stride = columns + 2;
        std::vector<float> got(static_cast<std::size_t>(rows * stride), 77.0f);
        ops().matmul(w.segment(), a, rows, begin, end, got.data(), stride);
        for (int row = 0; row < rows; ++row) {
          for (int c = 0; c < stride; ++c) {
            const float want = c < columns ? whole[static_cast<std::size_t>(row * n + 16 * begin + c)] : 77.0f;
            ASSERT_EQ(bits_of(got[static_cast<std::size_t>(row * stride + c)]), bits_of(want))
                << format_name(format) << " panels " << begin << ".." << end << " row " << row << " column " << c;
          }
        }
      }
    }
  }
}

TEST_P(CpuFloatMatmul, Bf16LeavesTheModeOfTheThreadAlone) {
  Random random(9);
  const FloatMatrix w(Format::kBF16, 16, 8, random);
  const Bf16Rows x(normal(random, 8), 1, 8);
  const unsigned before = _mm_getcsr();
  run(w.segment(), x.activations(), 1);
  EXPECT_EQ(_mm_getcsr(), before);
}

TEST_P(CpuFloatMatmul, ToBf16RoundsToTheNearestEven) {
  Random random(10);
  std::vector<float> x = normal(random, 300, 100.0f);
  const float inf = std::numeric_limits<float>::infinity();
  for (const std::uint32_t bits : {0x3F808000u, 0x3F818000u, 0x3F818001u, 0x3F807FFFu, 0x7F7FFFFFu, 0x00000001u,
                                   0x00008001u, 0x007FFFFFu, 0x80008000u, 0x80000000u, 0x00000000u}) {
    x.push_back(float_of(bits));
  }
  x.insert(x.end(), {inf, -inf});
  const int k = static_cast<int>(x.size());
  const Bf16Rows expected(x, 1, k);
  std::vector<std::uint16_t> got(static_cast<std::size_t>(expected.stride), 0xAAAA);
  ops().to_bf16(x.data(), k, got.data());
  const int end = (k + kBf16Line - 1) / kBf16Line * kBf16Line;
  for (int i = 0; i < expected.stride; ++i) {
    const std::uint16_t want = i < end ? expected.bits[static_cast<std::size_t>(i)] : 0xAAAA;
    EXPECT_EQ(got[static_cast<std::size_t>(i)], want) << i;
  }
  for (const std::uint32_t bits : {0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F800001u, 0xFF80FFFFu, 0x7FC00000u}) {
    const std::vector<float> nan(3, float_of(bits));
    ops().to_bf16(nan.data(), 3, got.data());
    for (int i = 0; i < 3; ++i) {
      const float rounded = float_of(std::uint32_t{got[static_cast<std::size_t>(i)]} << 16);
      EXPECT_TRUE(std::isnan(rounded)) << std::hex << bits;
    }
  }
}

}  // namespace
}  // namespace aotllm::cpu::test
