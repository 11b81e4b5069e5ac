#include <cmath>
#include <limits>

#include "float_matrix.h"
#include "panel_oracle.h"

namespace aotllm::cpu::test {
namespace {

struct Shape {
  int n, k, rows;
};

// Row counts around every tile size, n around panel borders, the shortest k; K formats need whole superblocks.
std::vector<Shape> shapes(const Layout& layout) {
  if (layout.scale_type == 'u' || layout.scale_type == 'i')
    return {{16, 256, 1}, {23, 512, 3}, {33, 256, 6}, {16, 512, 8}, {50, 256, 9}, {5, 256, 14}};
  return {{16, 32, 1}, {1, 96, 2},  {23, 64, 3}, {33, 32, 4}, {48, 160, 5},
          {17, 96, 7}, {80, 64, 8}, {50, 32, 9}, {5, 32, 17}, {20, 288, 3}};
}

/// Exact sums over a half of a block: of the products with the codes, and of the activations.
struct HalfSums {
  std::int32_t products = 0;
  std::int32_t q = 0;
};

HalfSums half_sums(const PackedMatrix& w, const QuantizedRows& x, int row, int n, int k) {
  HalfSums sums;
  for (int j = k; j < k + 16; ++j) {
    sums.products += x.q(row, j) * w.code(n, j);
    sums.q += x.q(row, j);
  }
  return sums;
}

/// Codes of 4 bits that are not looked up: both halves of a block are added as integers.
bool adds_integers(const Layout& layout) {
  return layout.bits == 4 && layout.scale_groups == 1 && layout.scale_type != 'f';
}

/// One output by the order that block_matmul.h documents.
float block_dot(const PackedMatrix& w, const QuantizedRows& x, int row, int n) {
  float acc = 0.0f;
  for (int i = 0; i < w.k(); i += 32) {
    const HalfSums first = half_sums(w, x, row, n, i);
    const HalfSums second = half_sums(w, x, row, n, i + 16);
    const int f0 = x.factor(row, i);
    const int f1 = x.factor(row, i + 16);
    const auto scale0 = static_cast<float>(f0);
    const auto scale1 = static_cast<float>(f1);
    const auto products0 = static_cast<float>(first.products);
    const auto products1 = static_cast<float>(second.products);
    if (w.layout().scale_groups == 1) {
      const float sum = adds_integers(w.layout()) ? static_cast<float>(f0 * first.products + f1 * second.products)
                                                  : std::fma(products1, scale1, products0 * scale0);
      acc = std::fma(sum, w.scale(n, i), acc);
      if (w.layout().affine) acc = std::fma(w.min(n, i), static_cast<float>(f0 * first.q + f1 * second.q), acc);
    } else if (w.layout().affine) {
      const float min0 = w.min(n, i) * static_cast<float>(first.q);
      const float min1 = w.min(n, i + 16) * static_cast<float>(second.q);
      acc = std::fma(std::fma(products0, w.scale(n, i), min0), scale0, acc);
      acc = std::fma(std::fma(products1, w.scale(n, i + 16), min1), scale1, acc);
    } else {
      acc = std::fma(products0 * scale0, w.scale(n, i), acc);
      acc = std::fma(products1 * scale1, w.scale(n, i + 16), acc);
    }
  }
  return acc * x.scale(row);
}

std::vector<float> block_matmul(const PackedMatrix& w, const QuantizedRows& x, int rows) {
  std::vector<float> y;
  for (int row = 0; row < rows; ++row) {
    for (int n = 0; n < w.n(); ++n) y.push_back(block_dot(w, x, row, n));
  }
  return y;
}

class CpuMatmul : public OnIsa {
 protected:
  std::vector<float> run(const Segment& w, const Activations& a, int rows) {
    std::vector<float> y(static_cast<std::size_t>(rows * w.n), -1.0f);
    ops().matmul(w, a, rows, 0, (w.n + 15) / 16, y.data(), w.n);
    return y;
  }
};
INSTANTIATE_ON_ISAS(CpuMatmul);

TEST_P(CpuMatmul, BlockFormatsFollowTheDocumentedOrderBitForBit) {
  Random random(1);
  for (const Layout& layout : block_layouts()) {
    for (const Shape& shape : shapes(layout)) {
      SCOPED_TRACE(std::string(format_name(layout.format)) + " n " + std::to_string(shape.n) + " k " +
                   std::to_string(shape.k) + " rows " + std::to_string(shape.rows));
      const PackedMatrix w(layout, shape.n, shape.k, random);
      const QuantizedRows x(shape.rows, shape.k, random);
      EXPECT_TRUE(same_bits(run(w.segment(), x.activations(), shape.rows), block_matmul(w, x, shape.rows)));
    }
  }
}

// Whatever tile a row falls into, on whatever ISA, with whole panels or a ragged last one.
TEST_P(CpuMatmul, RowsOfAnyCountAreTheSameBitsAsOnAvx2Alone) {
  const Kernels& avx2 = *kernels_for("avx2");
  Random random(8);
  constexpr int kMostRows = 33;
  for (const Layout& layout : block_layouts()) {
    for (const int n : {16, 37}) {
      const int k = 512;
      const PackedMatrix w(layout, n, k, random);
      const QuantizedRows x(kMostRows, k, random);
      std::vector<float> alone(static_cast<std::size_t>(kMostRows * n));
      for (int row = 0; row < kMostRows; ++row) {
        Activations a = x.activations();
        a.blocks += row * activation_stride(k);
        avx2.matmul(w.segment(), a, 1, 0, (n + 15) / 16, alone.data() + row * n, n);
      }
      for (int rows = 1; rows <= kMostRows; ++rows) {
        const std::vector<float> expected(alone.begin(), alone.begin() + rows * n);
        ASSERT_TRUE(same_bits(run(w.segment(), x.activations(), rows), expected))
            << format_name(layout.format) << " n " << n << " rows " << rows;
      }
    }
  }
}

// Every code, activation and factor at its largest: no int16 must saturate, and no int32 overflow.
TEST_P(CpuMatmul, IntegerSumsDoNotOverflow) {
  Random random(2);
  for (const Layout& layout : block_layouts()) {
    PackedMatrix w(layout, 16, 256, random);
    const std::size_t code_bytes = static_cast<std::size_t>(256 / 32 * 64 * layout.bits);
    for (const int fill : {0xFF, 0x00, 0x80, 0x7F}) {
      std::memset(const_cast<std::uint8_t*>(w.segment().panels), fill, code_bytes);
      for (const std::int8_t q : {std::int8_t{127}, std::int8_t{-127}}) {
        QuantizedRows x(2, 256, random);
        x.fill(q);
        EXPECT_TRUE(same_bits(run(w.segment(), x.activations(), 2), block_matmul(w, x, 2)))
            << format_name(layout.format) << " codes " << fill << " activations " << int{q};
      }
    }
  }
}

TEST_P(CpuMatmul, AnyPanelRangeAndRowSubsetGivesTheSameBits) {
  Random random(3);
  for (const Layout& layout : block_layouts()) {
    const int k = 256, n = 75, rows = 9, panels = 5;
    const PackedMatrix w(layout, n, k, random);
    const QuantizedRows x(rows, k, random);
    const std::vector<float> whole = run(w.segment(), x.activations(), rows);
    for (int begin = 0; begin < panels; ++begin) {
      for (int end = begin + 1; end <= panels; ++end) {
        const int first_row = (begin + end) % 4;
        const int count = rows - first_row - begin % 3;
        Activations a = x.activations();
        a.blocks += first_row * activation_stride(k);
        const int columns = std::min(n, 16 * end) - 16 * begin;
        std::vector<float> got(static_cast<std::size_t>(count * columns));
        ops().matmul(w.segment(), a, count, begin, end, got.data(), columns);
        std::vector<float> expected;
        for (int row = first_row; row < first_row + count; ++row) {
          for (int c = 0; c < columns; ++c)
            expected.push_back(whole[static_cast<std::size_t>(row * n + 16 * begin + c)]);
        }
        ASSERT_TRUE(same_bits(got, expected)) << format_name(layout.format) << " panels " << begin << ".." << end;
      }
    }
  }
}

TEST_P(CpuMatmul, NanStaysInItsRow) {
  Random random(9);
  constexpr int kRows = 3, kN = 16, kK = 256;
  const std::ptrdiff_t stride = activation_stride(kK);
  for (const Layout& layout : block_layouts()) {
    const PackedMatrix w(layout, kN, kK, random);
    std::vector<float> x = normal(random, kRows * kK);
    AlignedBytes lines(static_cast<std::size_t>(kRows * stride) * sizeof(ActivationBlock));
    auto* blocks = reinterpret_cast<ActivationBlock*>(lines.data());
    const auto product = [&] {
      for (int row = 0; row < kRows; ++row) ops().quantize(x.data() + row * kK, kK, blocks + row * stride);
      return run(w.segment(), {nullptr, 0, blocks}, kRows);
    };
    const std::vector<float> clean = product();
    x[kK + 77] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> got = product();
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (i / kN == 1) {
        ASSERT_TRUE(std::isnan(got[i])) << format_name(layout.format);
      } else {
        ASSERT_EQ(got[i], clean[i]) << format_name(layout.format);
      }
    }
  }
}

TEST_P(CpuMatmul, WritesNothingBeyondColumnN) {
  Random random(4);
  for (const Layout& layout : block_layouts()) {
    const int n = 21, k = 256, rows = 5, stride = 40;
    const PackedMatrix w(layout, n, k, random);
    const QuantizedRows x(rows, k, random);
    std::vector<float> y(rows * stride, 77.0f);
    ops().matmul(w.segment(), x.activations(), rows, 0, 2, y.data(), stride);
    for (int row = 0; row < rows; ++row) {
      for (int c = n; c < stride; ++c) ASSERT_EQ(y[static_cast<std::size_t>(row * stride + c)], 77.0f);
    }
  }
}

// ---- rows

TEST_P(CpuMatmul, DequantizeRowIsExact) {
  Random random(6);
  for (const Layout& layout : block_layouts()) {
    const PackedMatrix w(layout, 37, 512, random);
    for (const int row : {0, 15, 16, 36}) {
      std::vector<float> got(512), expected(512);
      ops().dequantize_row(w.segment(), row, 1.5f, got.data());
      for (int i = 0; i < 512; ++i) {
        const float product = w.scale(row, i) * static_cast<float>(w.code(row, i));
        expected[static_cast<std::size_t>(i)] = 1.5f * (w.layout().affine ? product + w.min(row, i) : product);
      }
      EXPECT_TRUE(same_bits(got, expected)) << format_name(layout.format) << " row " << row;
    }
  }
  for (const Format format : kFloatFormats) {
    const FloatMatrix w(format, 20, 33, random);
    std::vector<float> got(33), expected;
    ops().dequantize_row(w.segment(), 18, 2.0f, got.data());
    for (int i = 0; i < 33; ++i) expected.push_back(2.0f * w.values[static_cast<std::size_t>(18 * 33 + i)]);
    EXPECT_TRUE(same_bits(got, expected)) << format_name(format);
  }
}

TEST(CpuFormats, PanelBytesAreThoseOfTheDocument) {
  Random random(7);
  for (const Layout& layout : block_layouts()) {
    for (const int k : {32, 96, 256, 576, 4096}) {
      const PackedMatrix w(layout, 16, k, random);
      EXPECT_EQ(panel_bytes(layout.format, k), w.panel_bytes()) << format_name(layout.format) << " k " << k;
      EXPECT_EQ(panel_bytes(layout.format, k) % 64, 0u);
    }
  }
  EXPECT_EQ(panel_bytes(Format::kF32, 3), 3 * 64u);
  EXPECT_EQ(panel_bytes(Format::kF16, 3), 2 * 64u);
  EXPECT_EQ(panel_bytes(Format::kBF16, 4), 2 * 64u);
}

TEST(CpuFormats, NamesRoundTrip) {
  for (int i = 0; i <= static_cast<int>(Format::kQ4_1_G128); ++i) {
    const auto format = static_cast<Format>(i);
    Format parsed = Format::kF32;
    ASSERT_TRUE(parse_format(format_name(format), parsed)) << format_name(format);
    EXPECT_EQ(parsed, format);
  }
  Format untouched = Format::kQ5_1;
  EXPECT_FALSE(parse_format("q4_2", untouched));
  EXPECT_FALSE(parse_format("", untouched));
  EXPECT_EQ(untouched, Format::kQ5_1);
}

}  // namespace
}  // namespace aotllm::cpu::test
