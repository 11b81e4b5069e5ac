#include <cstring>
#include <optional>

#include "aotllm/errors.h"
#include "elementwise/rms_norm_plan.h"
#include "elementwise_check.h"

namespace aotllm::cuda {
namespace {

enum class Output { kBf16, kFp8Row, kFp8Block, kBoth };

struct Case {
  int width;
  int m;
  Output output = Output::kBf16;
  bool weight = true;
  bool residual = false;
  bool pick = false;
  std::optional<RmsNormPlan> plan = std::nullopt;

  std::string name() const {
    return "width " + std::to_string(width) + " m " + std::to_string(m) + " output " +
           std::to_string(static_cast<int>(output)) + (weight ? " weight" : "") + (residual ? " residual" : "") +
           (pick ? " pick" : "") + (plan ? " vectors " + std::to_string(plan->vectors) : "");
  }
};

constexpr float kEps = 1e-5f;
constexpr int kExtra = 2;  // rows after the last that must stay as they are

// What a case reads and writes.
struct Data {
  std::vector<Bf16> x;
  std::vector<Bf16> residual;
  std::vector<float> weight;
  std::vector<std::int32_t> pick;
  DeviceArray<Bf16> device_x;
  DeviceArray<Bf16> device_residual;
  DeviceArray<float> device_weight;
  DeviceArray<std::int32_t> device_pick;
  DeviceArray<Bf16> y;
  DeviceArray<std::uint8_t> codes;
  DeviceArray<float> scales;

  explicit Data(const Case& c) {
    const int rows = c.pick ? c.m + 5 : c.m;
    x = random_bf16(static_cast<std::size_t>(rows) * c.width, 3.0f);
    if (c.residual) residual = random_bf16(static_cast<std::size_t>(c.m) * c.width);
    weight = random_normal(c.width);
    for (int i = 0; i < c.m; ++i) pick.push_back(static_cast<std::int32_t>(random_engine()() % rows));
    device_x = DeviceArray<Bf16>(x);
    device_residual = DeviceArray<Bf16>(residual);
    device_weight = DeviceArray<float>(weight);
    device_pick = DeviceArray<std::int32_t>(pick);
    y = DeviceArray<Bf16>(static_cast<std::size_t>(c.m + kExtra) * c.width);
    codes = DeviceArray<std::uint8_t>(y.size());
    scales = DeviceArray<float>(static_cast<std::size_t>(c.m + kExtra) * std::max(1, c.width / 128));
    y.fill(0xFF);
    codes.fill(0xFF);
    scales.fill(0xFF);
  }

  RmsNormArgs args(const Case& c) const {
    RmsNormArgs args;
    args.x = device_x.data();
    if (c.pick) args.pick = device_pick.data();
    if (c.weight) args.weight = device_weight.data();
    if (c.residual) args.residual = device_residual.data();
    args.eps = kEps;
    args.m = c.m;
    args.width = c.width;
    if (c.output == Output::kBf16 || c.output == Output::kBoth) args.y = y.data();
    if (c.output != Output::kBf16) {
      args.y_fp8 = codes.data();
      args.y_scales = scales.data();
      args.per_block = c.output == Output::kFp8Block;
    }
    return args;
  }

  std::vector<double> reference_row(const Case& c, int row) const {
    const std::int64_t source = static_cast<std::int64_t>(c.pick ? pick[row] : row) * c.width;
    double squares = 0.0;
    for (int j = 0; j < c.width; ++j) squares += from_bf16(x[source + j]) * from_bf16(x[source + j]);
    const double rstd = c.weight ? 1.0 / std::sqrt(squares / c.width + kEps) : 1.0;
    std::vector<double> y_row(c.width);
    for (int j = 0; j < c.width; ++j) y_row[j] = from_bf16(x[source + j]) * rstd * (c.weight ? weight[j] : 1.0);
    return y_row;
  }
};

void check_bf16(const Case& c, const Data& data, const std::vector<int>& rows) {
  const std::vector<Bf16> got = data.y.download();
  Worst worst;
  for (const int row : rows) {
    const std::vector<double> want = data.reference_row(c, row);
    for (int j = 0; j < c.width; ++j) {
      const std::int64_t i = static_cast<std::int64_t>(row) * c.width + j;
      const double added = c.residual ? from_bf16(data.residual[i]) : 0.0;
      const double value = want[j] + added;
      const double float32 = 2e-6 * (std::abs(want[j]) + std::abs(added));
      worst.add(i, from_bf16(got[i]), value, kHalfUlpBf16 * std::abs(value) + float32 + 1e-30);
    }
  }
  worst.expect(c.name());
  EXPECT_TRUE(untouched(bytes_from(got, static_cast<std::size_t>(c.m) * c.width))) << c.name();
}

std::uint8_t code_of(double value) {
  return __nv_cvt_double_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

// Codes are right but for values that float32 may put on the other side of a tie.
void check_fp8(const Case& c, const Data& data, const std::vector<int>& rows) {
  const std::vector<std::uint8_t> codes = data.codes.download();
  const std::vector<float> scales = data.scales.download();
  const int group = c.output == Output::kFp8Block ? 128 : c.width;
  const int groups = c.width / group;
  Worst worst;
  Worst worst_scale;
  std::int64_t other_codes = 0;
  for (const int row : rows) {
    const std::vector<double> want = data.reference_row(c, row);
    for (int g = 0; g < groups; ++g) {
      double largest = 0.0;
      for (int j = g * group; j < (g + 1) * group; ++j) largest = std::max(largest, std::abs(want[j]));
      const double scale = scales[row * groups + g];
      const double right = largest == 0.0 ? 1.0 : largest / 448.0;
      worst_scale.add(row * groups + g, scale, right, 1e-6 * right);
      for (int j = g * group; j < (g + 1) * group; ++j) {
        const std::int64_t i = static_cast<std::int64_t>(row) * c.width + j;
        const double coded = want[j] / scale;
        worst.add(i, from_fp8(codes[i]), coded, (kHalfUlpFp8 * std::abs(coded) + kHalfStepFp8) * 1.0001);
        other_codes += codes[i] != code_of(coded * (1.0 - 1e-6)) && codes[i] != code_of(coded * (1.0 + 1e-6));
      }
    }
  }
  worst_scale.expect(c.name() + " scale");
  worst.expect(c.name() + " code");
  EXPECT_EQ(other_codes, 0) << c.name();
  EXPECT_TRUE(untouched(bytes_from(codes, static_cast<std::size_t>(c.m) * c.width))) << c.name();
  EXPECT_TRUE(untouched(bytes_from(scales, static_cast<std::size_t>(c.m) * groups))) << c.name();
}

void run_case(const Case& c, const Data& data) {
  const RmsNormArgs args = data.args(c);
  if (c.plan) {
    rms_norm(args, *c.plan, Stream{});
  } else {
    rms_norm(args, Stream{});
  }
  std::vector<int> rows;
  const int step = std::max(1, c.m / 40);
  for (int row = 0; row < c.m; row += step) rows.push_back(row);
  if (rows.back() != c.m - 1) rows.push_back(c.m - 1);
  if (args.y != nullptr) check_bf16(c, data, rows);
  if (args.y_fp8 != nullptr) check_fp8(c, data, rows);
}

void run_case(const Case& c) {
  run_case(c, Data(c));
}

TEST(RmsNorm, EveryWidthAndOutput) {
  AOTLLM_NEEDS_GPU();
  for (const int width : {8, 24, 128, 264, 1000, 2048, 4096, 4104, 5376, 8192, 14336, 16384, 28672, 32768}) {
    for (const int m : {1, 3, 64, 300}) {
      if (static_cast<std::int64_t>(width) * m > 1500000) continue;
      run_case({width, m});
      run_case({width, m, Output::kBf16, true, true});
      run_case({width, m, Output::kFp8Row});
      run_case({width, m, Output::kFp8Row, false});
      if (width % 128 == 0) run_case({width, m, Output::kFp8Block});
      if (width % 128 == 0) run_case({width, m, Output::kFp8Block, false});
    }
  }
}

TEST(RmsNorm, EveryPlanGivesTheSame) {
  AOTLLM_NEEDS_GPU();
  for (const int width : {640, 4096, 7168}) {
    for (const int vectors : {1, 2, 4, 8}) {
      const RmsNormPlan plan = rms_norm_plan_of(width, vectors);
      if (plan.threads == 0) continue;
      for (const Output output : {Output::kBf16, Output::kFp8Row, Output::kFp8Block, Output::kBoth}) {
        run_case({width, 7, output, true, false, false, plan});
      }
    }
  }
}

TEST(RmsNorm, PicksRowsAndCopiesThemBitByBit) {
  AOTLLM_NEEDS_GPU();
  for (const int width : {64, 4096, 12288}) {
    run_case({width, 37, Output::kBf16, true, false, true});
    run_case({width, 37, Output::kBf16, true, true, true});
    run_case({width, 37, Output::kFp8Row, true, false, true});
    const Case copy{width, 37, Output::kBf16, false, false, true};
    const Data data(copy);
    rms_norm(data.args(copy), Stream{});
    const std::vector<Bf16> got = data.y.download();
    for (int row = 0; row < copy.m; ++row) {
      const std::size_t bytes = static_cast<std::size_t>(width) * sizeof(Bf16);
      EXPECT_EQ(std::memcmp(got.data() + row * width, data.x.data() + data.pick[row] * width, bytes), 0) << row;
    }
  }
}

TEST(RmsNorm, ManyRowsAndEachAsIfAlone) {
  AOTLLM_NEEDS_GPU();
  for (const int width : {256, 1536, 4096, 8192, 14336}) {
    for (const Output output : {Output::kBf16, Output::kFp8Row, Output::kFp8Block}) {
      const Case many{width, width > 4096 ? 530 : 1777, output};
      const Data data(many);
      run_case(many, data);
      const std::vector<Bf16> y = data.y.download();
      const std::vector<std::uint8_t> codes = data.codes.download();
      RmsNormArgs one = data.args(many);
      one.m = 1;
      const int row = many.m - 3;
      one.x += static_cast<std::size_t>(row) * width;
      rms_norm(one, Stream{});
      const std::vector<Bf16> y_one = data.y.download();
      const std::vector<std::uint8_t> codes_one = data.codes.download();
      const std::size_t at = static_cast<std::size_t>(row) * width;
      if (one.y != nullptr) EXPECT_EQ(std::memcmp(y_one.data(), y.data() + at, width * 2), 0) << many.name();
      if (one.y_fp8 != nullptr) EXPECT_EQ(std::memcmp(codes_one.data(), codes.data() + at, width), 0) << many.name();
    }
  }
}

TEST(RmsNorm, ZerosTinyValuesAndNaNs) {
  AOTLLM_NEEDS_GPU();
  constexpr int kWidth = 1024;
  for (const bool per_block : {false, true}) {
    std::vector<float> values(4 * kWidth, 0.0f);
    for (int j = 0; j < kWidth; ++j) values[kWidth + j] = 1e-38f * static_cast<float>(j % 3 - 1);
    for (int j = 0; j < 2 * kWidth; ++j) values[2 * kWidth + j] = static_cast<float>(j % 7 - 3);
    values[3 * kWidth + 5] = NAN;
    const DeviceArray<Bf16> x(to_bf16(values));
    DeviceArray<std::uint8_t> codes(4 * kWidth);
    DeviceArray<float> scales(4 * kWidth / 128);
    codes.fill(0xFF);
    RmsNormArgs args;
    args.x = x.data();
    args.m = 4;
    args.width = kWidth;
    args.y_fp8 = codes.data();
    args.y_scales = scales.data();
    args.per_block = per_block;
    rms_norm(args, Stream{});
    const std::vector<std::uint8_t> got = codes.download();
    const std::vector<float> got_scales = scales.download();
    EXPECT_EQ(got_scales[0], 1.0f);
    for (int j = 0; j < kWidth; ++j) {
      ASSERT_EQ(from_fp8(got[j]), 0.0) << j;
      ASSERT_TRUE(std::isfinite(from_fp8(got[kWidth + j]))) << j;
      ASSERT_TRUE(std::isfinite(from_fp8(got[2 * kWidth + j]))) << j;
    }
    EXPECT_TRUE(std::isnan(from_fp8(got[3 * kWidth + 5])));
  }
}

TEST(RmsNorm, RefusesWhatItCannotDo) {
  RmsNormArgs args;
  args.m = 1;
  args.width = 12;
  args.y = reinterpret_cast<Bf16*>(16);
  EXPECT_THROW(rms_norm(args, Stream{}), Error);
  args.width = 32768 + 8;
  EXPECT_THROW(rms_norm(args, Stream{}), Error);
  args.width = 64;
  args.y_fp8 = reinterpret_cast<std::uint8_t*>(16);
  EXPECT_THROW(rms_norm(args, Stream{}), Error);
}

}  // namespace
}  // namespace aotllm::cuda
