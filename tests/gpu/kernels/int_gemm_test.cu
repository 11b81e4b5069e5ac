#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "gemm/dequantize.h"
#include "gemm/int_gemm.h"
#include "int_matrix.h"
#include "reference.h"

namespace aotllm::cuda {
namespace {

struct Case {
  IntFormat format = IntFormat::kInt4Group128;
  int rows_tile = 8;  // 0: dequantized, then a tile GEMM
  int m = 1;
  int n = 256;
  int k = 256;
  Epilogue epilogue = Epilogue::kStore;
  bool bias = false;
  Activation activation = Activation::kSilu;
  float softcap = 0.0f;
  IntPlan plan{.rows = 0};  // rows = 0: the default plan
};

std::string describe(const Case& c) {
  return "format " + std::to_string(static_cast<int>(c.format)) + " tile " + std::to_string(c.rows_tile) + " m " +
         std::to_string(c.m) + " n " + std::to_string(c.n) + " k " + std::to_string(c.k) + " epilogue " +
         std::to_string(static_cast<int>(c.epilogue)) + " plan " + std::to_string(c.plan.rows) + "x" +
         std::to_string(c.plan.sub) + " stages " + std::to_string(c.plan.stages) + " grid " +
         std::to_string(c.plan.grid) + " cluster " + std::to_string(c.plan.cluster);
}

/// Made once for each format and shape: drawing each anew would take most of the time of these tests.
const IntMatrix& matrix(IntFormat format, int n, int k) {
  static std::map<std::tuple<IntFormat, int, int>, std::unique_ptr<IntMatrix>> made;
  auto& found = made[{format, n, k}];
  if (found == nullptr) found = std::make_unique<IntMatrix>(format, n, k);
  return *found;
}

/// A problem on the device, and the same numbers for the reference.
struct Instance {
  Case c;
  int max_m = 0;
  int columns = 0;  // of y
  const IntMatrix& w;
  std::vector<Bf16> x, residual;
  std::vector<float> x_values;
  std::vector<float> bias;
  DeviceArray<std::uint8_t> y;
  DeviceArray<Bf16> x_data, residual_data;
  DeviceArray<float> bias_data;
  GemmProblem problem;

  explicit Instance(const Case& from)
      : c(from),
        max_m((c.m + 7) / 8 * 8),
        columns(c.epilogue == Epilogue::kGated ? c.n / 2 : c.n),
        w(matrix(c.format, c.n, c.k)) {
    x = random_bf16(static_cast<std::size_t>(max_m) * c.k);
    for (const Bf16 value : x) x_values.push_back(static_cast<float>(from_bf16(value)));
    x_data = DeviceArray<Bf16>(x);
    const std::size_t used = static_cast<std::size_t>(c.m) * c.k;  // rows from m on may hold anything
    check(cudaMemset(x_data.data() + used, 0xFF, x_data.bytes() - 2 * used), "poison");
    if (c.bias) bias = random_normal(c.n), bias_data = DeviceArray<float>(bias);
    if (c.epilogue == Epilogue::kResidual) {
      residual = random_bf16(static_cast<std::size_t>(max_m) * c.n);
      residual_data = DeviceArray<Bf16>(residual);
    }
    y = DeviceArray<std::uint8_t>((static_cast<std::size_t>(max_m) + 1) * columns * value_bytes());
    problem.w = w.weights();
    problem.x = x_data.data();
    problem.max_m = max_m;
    problem.bias = bias_data.data();
    problem.epilogue = c.epilogue;
    problem.activation = c.activation;
    problem.residual = residual_data.data();
    problem.y = y.data();
    problem.softcap = c.softcap;
  }

  std::size_t value_bytes() const { return c.epilogue == Epilogue::kLogits ? 4 : 2; }

  double product(int row, int token) const {
    const float* a = w.row(row);
    const float* b = x_values.data() + static_cast<std::size_t>(token) * c.k;
    double total = c.bias ? bias[row] : 0.0;
    for (int i = 0; i < c.k; ++i) total += static_cast<double>(a[i]) * b[i];
    return total;
  }

  /// y[token][column] in float64.
  double want(int token, int column) const {
    if (c.epilogue == Epilogue::kGated) {
      const int gate_row = column / 8 * 16 + column % 8;
      const double gate = product(gate_row, token);
      const double up = product(gate_row + 8, token);
      if (c.activation == Activation::kSilu) return gate / (1.0 + std::exp(-gate)) * up;
      return 0.5 * gate * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * up;
    }
    const double p = product(column, token);
    if (c.epilogue == Epilogue::kResidual) {
      return p + from_bf16(residual[static_cast<std::size_t>(token) * c.n + column]);
    }
    return c.softcap > 0.0f ? c.softcap * std::tanh(p / c.softcap) : p;
  }

  double got(const std::vector<std::uint8_t>& bytes, std::size_t index) const {
    if (c.epilogue == Epilogue::kLogits) {
      float value;
      std::memcpy(&value, bytes.data() + index * 4, 4);
      return value;
    }
    Bf16 value;
    std::memcpy(&value, bytes.data() + index * 2, 2);
    return from_bf16(value);
  }
};

Workspace workspace() {
  static DeviceArray<std::uint8_t> memory(dequant_workspace_bytes(12288, 4096));
  static const bool poisoned = (memory.fill(0xFF), true);  // only counters of its own may need zeros
  (void)poisoned;
  return {memory.data(), memory.bytes()};
}

std::unique_ptr<Gemm> make(const Case& c, const GemmProblem& problem) {
  if (c.rows_tile == 0) {
    return make_dequant_gemm(problem, workspace(),
                             [](const GemmProblem& p, Workspace scratch) { return make_tile_gemm(p, 0, scratch); });
  }
  return c.plan.rows == 0 ? make_int_gemm(problem, c.rows_tile, workspace())
                          : make_int_gemm(problem, c.rows_tile, workspace(), c.plan);
}

/// Columns to compare: all of a small matrix, of a large one groups at both ends and between.
std::vector<int> sampled_columns(int columns) {
  std::vector<int> sample;
  const int groups = (columns + 7) / 8;
  for (int i = 0; i < 24; ++i) {
    const int group = i < 4 ? i : i < 8 ? groups - 1 - (i - 4) : static_cast<int>(random_engine()() % groups);
    for (int j = 0; j < 8; ++j) {
      if (group >= 0 && group * 8 + j < columns) sample.push_back(group * 8 + j);
    }
  }
  std::sort(sample.begin(), sample.end());
  sample.erase(std::unique(sample.begin(), sample.end()), sample.end());
  return sample;
}

/// Runs a case twice and compares with the reference; returns the relative error.
double run(const Case& c) {
  Instance instance(c);
  const auto gemm = make(c, instance.problem);
  if (gemm == nullptr) {
    ADD_FAILURE() << "no kernel for " << describe(c);
    return INFINITY;
  }
  instance.y.fill(0xFF);
  gemm->launch(c.m, {});
  check(cudaGetLastError(), "launch");
  const auto bytes = instance.y.download();
  instance.y.fill(0xFF);
  gemm->launch(c.m, {});
  EXPECT_EQ(bytes, instance.y.download()) << "a second run differs: " << describe(c);

  const std::size_t written = static_cast<std::size_t>(c.m) * instance.columns * instance.value_bytes();
  EXPECT_TRUE(std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(written), bytes.end(),
                          [](std::uint8_t byte) { return byte == 0xFF; }))
      << "rows from m on were written: " << describe(c);
  std::vector<double> got, want;
  int worst_token = 0;
  int worst_column = 0;
  double worst = -1.0;
  for (int token = 0; token < c.m; token += std::max(1, c.m / 8)) {
    for (const int column : sampled_columns(instance.columns)) {
      got.push_back(instance.got(bytes, static_cast<std::size_t>(token) * instance.columns + column));
      want.push_back(instance.want(token, column));
      const double difference = std::abs(got.back() - want.back());
      if (worst < difference || !std::isfinite(difference)) {
        worst = std::isfinite(difference) ? difference : INFINITY, worst_token = token, worst_column = column;
      }
    }
  }
  int unwritten = 0;
  for (std::size_t i = 0; i < written / instance.value_bytes(); ++i) {
    unwritten += !std::isfinite(instance.got(bytes, i));
  }
  EXPECT_EQ(unwritten, 0) << describe(c);
  const double error = relative_error(got, want);
  const double limit = c.epilogue != Epilogue::kLogits || c.rows_tile == 0 ? 5e-3 : 1e-5;
  EXPECT_LT(error, limit) << describe(c) << "; worst at token " << worst_token << " column " << worst_column
                          << ": off by " << worst;
  return error;
}

constexpr IntFormat kFormats[] = {IntFormat::kInt4Group128, IntFormat::kInt4Group32, IntFormat::kInt8Row,
                                  IntFormat::kInt8Group32};

// Clusters need k in equal shares; where they are not, fewer CTAs share a tile.
const std::vector<IntPlan> kPlans = {{64, 2, 6},
                                     {64, 2, 3, 128, false, 1, 2, 2},
                                     {128, 1, 6, 3, true, 1, 1000},
                                     {64, 2, 4, 0, false, 2},
                                     {64, 2, 3, 0, false, 4, 1 << 20},
                                     {128, 1, 6, 0, false, 4, 2},
                                     {128, 2, 3, 0, false, 8},
                                     {128, 2, 4, 37}};

// Of few rows of four bits besides.
const std::vector<IntPlan> kDeepPlans = {{64, 4, 2}, {64, 4, 3, 0, false, 2}, {64, 4, 2, 3, true, 1, 1 << 20}};

std::vector<IntPlan> plans_of(IntFormat format, int rows_tile) {
  std::vector<IntPlan> plans = kPlans;
  if (int_has_four_bits(format) && rows_tile <= 16) plans.insert(plans.end(), kDeepPlans.begin(), kDeepPlans.end());
  return plans;
}

TEST(IntGemm, EveryKernelWithRaggedShapes) {
  AOTLLM_NEEDS_GPU();
  const std::pair<int, int> shapes[] = {{1056, 1056}, {160, 4096 + 32}, {12000, 256}, {32, 32},
                                        {128, 128},   {416, 2016},      {1040, 976}};
  double worst = 0.0;
  for (const IntFormat format : kFormats) {
    for (const int rows_tile : {8, 16, 32, 64}) {
      int which = rows_tile;
      for (const IntPlan& plan : plans_of(format, rows_tile)) {
        for (const auto& [n, k] : shapes) {
          Case c{.format = format, .rows_tile = rows_tile, .n = n, .k = k, .plan = plan};
          c.m = which % 3 == 0 ? rows_tile : which % 3 == 1 ? 1 : rows_tile / 2 + 1;
          c.epilogue = Epilogue::kLogits;  // the most exact
          worst = std::max(worst, run(c));
          ++which;
        }
      }
    }
  }
  std::printf("worst relative error of float32 results: %.2e\n", worst);
}

TEST(IntGemm, EveryEpilogueAndNumberOfRows) {
  AOTLLM_NEEDS_GPU();
  double worst = 0.0;
  for (const IntFormat format : kFormats) {
    for (const int rows_tile : {8, 16, 32, 64, 0}) {
      for (const Epilogue epilogue : {Epilogue::kStore, Epilogue::kResidual, Epilogue::kGated, Epilogue::kLogits}) {
        for (const bool bias : {false, true}) {
          Case c{.format = format, .rows_tile = rows_tile, .n = 416, .k = 1024, .epilogue = epilogue, .bias = bias};
          c.m = rows_tile == 0 ? 200 : bias ? rows_tile - 1 : rows_tile;
          c.activation = bias ? Activation::kGeluTanh : Activation::kSilu;
          c.softcap = bias && epilogue == Epilogue::kLogits ? 2.0f : 0.0f;
          worst = std::max(worst, run(c));
        }
      }
    }
  }
  for (int m = 1; m <= 64; m += 3) {
    worst = std::max(worst, run({.rows_tile = m <= 8    ? 8
                                              : m <= 16 ? 16
                                              : m <= 32 ? 32
                                                        : 64,
                                 .m = m,
                                 .n = 304,
                                 .k = 592}));
  }
  std::printf("worst relative error of bf16 results: %.2e\n", worst);
}

TEST(IntGemm, ResidualMayBeTheOutput) {
  AOTLLM_NEEDS_GPU();
  Instance instance({.rows_tile = 16, .m = 13, .n = 512, .k = 512, .epilogue = Epilogue::kResidual});
  make(instance.c, instance.problem)->launch(13, {});
  const auto apart = instance.y.download();
  instance.problem.y = instance.residual_data.data();
  make(instance.c, instance.problem)->launch(13, {});
  const auto together = instance.residual_data.download();
  EXPECT_EQ(std::memcmp(apart.data(), together.data(), std::size_t{13} * 512 * 2), 0);
}

TEST(IntGemm, RowsDoNotDependOnTheirNumber) {
  AOTLLM_NEEDS_GPU();
  for (const IntFormat format : kFormats) {
    Instance instance(
        {.format = format, .rows_tile = 64, .m = 64, .n = 1024, .k = 1024, .epilogue = Epilogue::kLogits});
    const auto gemm = make(instance.c, instance.problem);
    gemm->launch(64, {});
    const auto all = instance.y.download();
    gemm->launch(3, {});
    EXPECT_EQ(all, instance.y.download());
  }
}

/// x0 → x1 → x2 → x0 …, each launch before its predecessor has ended: the same as one after the other.
TEST(IntGemm, ChainOfProgrammaticLaunches) {
  AOTLLM_NEEDS_GPU();
  for (const int rows_tile : {8, 64, 0}) {
    const int m = rows_tile == 0 ? 96 : rows_tile;
    const Case c{.rows_tile = rows_tile, .m = m, .n = 2048, .k = 2048};
    Instance a(c), b(c), last(c);
    b.problem.x = a.y.data();
    last.problem.x = b.y.data();
    last.problem.y = a.x_data.data();
    const std::unique_ptr<Gemm> gemms[] = {make(c, a.problem), make(c, b.problem), make(c, last.problem)};
    const auto run_chain = [&](bool programmatic) {
      a.x_data.upload(a.x);
      cudaStream_t handle;
      check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "stream");
      for (int i = 0; i < 30; ++i) gemms[i % 3]->launch(m, {handle, programmatic});
      check(cudaStreamSynchronize(handle), "chain");
      check(cudaStreamDestroy(handle), "stream");
      const auto x = a.x_data.download();
      std::vector<std::uint16_t> bits(x.size());
      std::memcpy(bits.data(), x.data(), x.size() * 2);
      return bits;
    };
    const auto want = run_chain(false);
    for (int i = 0; i < 20; ++i) ASSERT_EQ(want, run_chain(true)) << "tile " << rows_tile << " repetition " << i;
  }
}

/// The very numbers: bf16(scale · (u − zero)), computed in float32.
TEST(Dequantize, IsExactButForOneRounding) {
  AOTLLM_NEEDS_GPU();
  for (const IntFormat format : kFormats) {
    for (const auto& [n, k] : {std::pair(64, 128), {80, 336}, {1056, 2064}}) {
      const IntMatrix w(format, n, k);
      DeviceArray<Bf16> out(static_cast<std::size_t>(n) * k + 8);
      out.fill(0xFF);
      dequantize(w.weights(), out.data(), {});
      const auto got = out.download();
      int wrong = 0;
      for (int row = 0; row < n; ++row) {
        for (int column = 0; column < k; ++column) {
          const Bf16 want = __float2bfloat16_rn(w.row(row)[column]);
          wrong += from_bf16(got[static_cast<std::size_t>(row) * k + column]) != from_bf16(want);
        }
      }
      EXPECT_EQ(wrong, 0) << "format " << static_cast<int>(format) << " [" << n << ", " << k << "]";
      for (int i = 0; i < 8; ++i) EXPECT_TRUE(std::isnan(from_bf16(got[static_cast<std::size_t>(n) * k + i])));
    }
  }
}

TEST(IntGemm, RefusesWhatItDoesNotTake) {
  AOTLLM_NEEDS_GPU();
  Instance instance({.n = 256, .k = 256});
  GemmProblem problem = instance.problem;
  EXPECT_EQ(make_int_gemm(problem, 12, workspace()), nullptr);
  problem.w.group = 64;
  EXPECT_EQ(make_int_gemm(problem, 8, workspace()), nullptr);
  problem = instance.problem;
  problem.w.zeros = nullptr;
  EXPECT_EQ(make_int_gemm(problem, 8, workspace()), nullptr);
  problem = instance.problem;
  problem.w.type = WeightType::kBf16;
  EXPECT_EQ(make_int_gemm(problem, 8, workspace()), nullptr);
  EXPECT_EQ(make_dequant_gemm(instance.problem, {workspace().data, kWorkspaceBytes}, nullptr), nullptr)
      << "the workspace is too small";
}

}  // namespace
}  // namespace aotllm::cuda
