#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "gemm/skinny_gemm.h"
#include "reference.h"

namespace aotllm::cuda {
namespace {

struct Case {
  WeightType type = WeightType::kBf16;
  int rows_tile = 8;
  int m = 1;
  int n = 256;
  int k = 256;
  Epilogue epilogue = Epilogue::kStore;
  bool bias = false;
  Activation activation = Activation::kSilu;
  float softcap = 0.0f;
  SkinnyPlan plan{};  // rows = 0: the default plan
};

std::string describe(const Case& c) {
  return "type " + std::to_string(static_cast<int>(c.type)) + " tile " + std::to_string(c.rows_tile) + " m " +
         std::to_string(c.m) + " n " + std::to_string(c.n) + " k " + std::to_string(c.k) + " epilogue " +
         std::to_string(static_cast<int>(c.epilogue)) + " plan " + std::to_string(c.plan.rows) + "x" +
         std::to_string(c.plan.sub) + " stages " + std::to_string(c.plan.stages) + " grid " +
         std::to_string(c.plan.grid) + " cluster " + std::to_string(c.plan.cluster) + " early " +
         std::to_string(c.plan.early);
}

/// Slices of one pool of fresh normal values: drawing each matrix anew would take most of the time of these tests.
std::span<const float> normals(std::size_t size) {
  static const std::vector<float> pool = random_normal(std::size_t{6} << 20);
  return std::span(pool).subspan(random_engine()() % (pool.size() - size), size);
}

/// A problem on the device, and the same numbers as float32 for the reference.
struct Instance {
  Case c;
  int max_m = 0;
  int columns = 0;          // of y
  std::vector<float> w, x;  // codes or values, [n, k] and [max_m, k]
  std::vector<float> w_scales, x_scales, bias;
  std::vector<Bf16> residual;
  DeviceArray<std::uint8_t> w_data, x_data, y;
  DeviceArray<float> w_scales_data, x_scales_data, bias_data;
  DeviceArray<Bf16> residual_data;
  GemmProblem problem;

  explicit Instance(const Case& from) : c(from), max_m((c.m + 7) / 8 * 8) {
    const bool bf16 = c.type == WeightType::kBf16;
    columns = c.epilogue == Epilogue::kGated ? c.n / 2 : c.n;
    const float w_sigma = bf16 ? 1.0f / std::sqrt(static_cast<float>(c.k)) : 16.0f;
    w_data = store(w, static_cast<std::size_t>(c.n) * c.k, w_sigma, bf16);
    x_data = store(x, static_cast<std::size_t>(max_m) * c.k, bf16 ? 1.0f : 16.0f, bf16);
    // Rows from m on may hold anything: NaN in both formats.
    const std::size_t used = static_cast<std::size_t>(c.m) * c.k * (bf16 ? 2 : 1);
    check(cudaMemset(x_data.data() + used, 0xFF, x_data.bytes() - used), "poison");
    if (!bf16) {
      const int blocks = (c.k + 127) / 128;
      const bool block = c.type == WeightType::kFp8Block;
      const float unit = 1.0f / (16.0f * std::sqrt(static_cast<float>(c.k)));
      w_scales = scales(block ? static_cast<std::size_t>((c.n + 127) / 128) * blocks : c.n, unit);
      x_scales = scales(block ? static_cast<std::size_t>(max_m) * blocks : max_m, 1.0f / 16.0f);
      std::fill(x_scales.begin() + static_cast<std::ptrdiff_t>(c.m) * (block ? blocks : 1), x_scales.end(), NAN);
      w_scales_data = DeviceArray<float>(w_scales);
      x_scales_data = DeviceArray<float>(x_scales);
    }
    if (c.bias) bias = random_normal(c.n), bias_data = DeviceArray<float>(bias);
    if (c.epilogue == Epilogue::kResidual) {
      residual = random_bf16(static_cast<std::size_t>(max_m) * c.n);
      residual_data = DeviceArray<Bf16>(residual);
    }
    y = DeviceArray<std::uint8_t>((static_cast<std::size_t>(max_m) + 1) * columns * value_bytes());
    problem.w = {c.type, c.n, c.k, w_data.data(), w_scales_data.data(), nullptr};
    problem.x = x_data.data();
    problem.x_scales = x_scales_data.data();
    problem.max_m = max_m;
    problem.bias = bias_data.data();
    problem.epilogue = c.epilogue;
    problem.activation = c.activation;
    problem.residual = residual_data.data();
    problem.y = y.data();
    problem.softcap = c.softcap;
  }

  std::size_t value_bytes() const { return c.epilogue == Epilogue::kLogits ? 4 : 2; }

  static std::vector<float> scales(std::size_t size, float unit) {
    std::vector<float> values(size);
    std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
    for (float& value : values) value = unit * uniform(random_engine());
    return values;
  }

  /// Uploads `size` random values of the type and keeps what they are exactly.
  static DeviceArray<std::uint8_t> store(std::vector<float>& exact, std::size_t size, float sigma, bool bf16) {
    std::vector<float> values(size);
    const auto from = normals(size);
    for (std::size_t i = 0; i < size; ++i) values[i] = sigma * from[i];
    exact.resize(size);
    std::vector<std::uint8_t> bytes(size * (bf16 ? 2 : 1));
    if (bf16) {
      const auto rounded = to_bf16(values);
      std::memcpy(bytes.data(), rounded.data(), bytes.size());
      for (std::size_t i = 0; i < size; ++i) exact[i] = static_cast<float>(from_bf16(rounded[i]));
    } else {
      bytes = to_fp8(values);
      for (std::size_t i = 0; i < size; ++i) exact[i] = static_cast<float>(from_fp8(bytes[i]));
    }
    return DeviceArray<std::uint8_t>(bytes);
  }

  double product(int row, int token) const {
    const float* a = w.data() + static_cast<std::size_t>(row) * c.k;
    const float* b = x.data() + static_cast<std::size_t>(token) * c.k;
    const int blocks = (c.k + 127) / 128;
    double total = 0.0;
    for (int block = 0; block < blocks; ++block) {
      double sum = 0.0;
      const int end = std::min(c.k, 128 * block + 128);
      for (int i = 128 * block; i < end; ++i) sum += static_cast<double>(a[i]) * b[i];
      if (c.type == WeightType::kFp8Block) {
        sum *= static_cast<double>(w_scales[static_cast<std::size_t>(row / 128) * blocks + block]) *
               x_scales[static_cast<std::size_t>(token) * blocks + block];
      }
      total += sum;
    }
    if (c.type == WeightType::kFp8) total *= static_cast<double>(w_scales[row]) * x_scales[token];
    return total + (c.bias ? bias[row] : 0.0f);
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

DeviceArray<std::uint8_t>& workspace() {
  static DeviceArray<std::uint8_t> memory(kWorkspaceBytes);
  static const bool poisoned = (memory.fill(0xFF), true);  // only counters of its own may need zeros
  (void)poisoned;
  return memory;
}

std::unique_ptr<Gemm> make(const Case& c, const GemmProblem& problem) {
  const Workspace scratch{workspace().data(), workspace().bytes()};
  return c.plan.rows == 0 ? make_skinny_gemm(problem, c.rows_tile, scratch)
                          : make_skinny_gemm(problem, c.rows_tile, scratch, c.plan);
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
  for (int token = 0; token < c.m; ++token) {
    for (const int column : sampled_columns(instance.columns)) {
      got.push_back(instance.got(bytes, static_cast<std::size_t>(token) * instance.columns + column));
      want.push_back(instance.want(token, column));
      const double difference = std::abs(got.back() - want.back());
      if (worst < difference || !std::isfinite(difference)) {
        worst = difference, worst_token = token, worst_column = column;
        if (!std::isfinite(difference)) worst = INFINITY;
      }
    }
  }
  int unwritten = 0;
  for (std::size_t i = 0; i < written / instance.value_bytes(); ++i) {
    unwritten += !std::isfinite(instance.got(bytes, i));
  }
  EXPECT_EQ(unwritten, 0) << describe(c);
  const double error = relative_error(got, want);
  const double limit = c.epilogue != Epilogue::kLogits ? 5e-3 : c.type == WeightType::kBf16 ? 1e-4 : 2e-3;
  EXPECT_LT(error, limit) << describe(c) << "; worst at token " << worst_token << " column " << worst_column
                          << ": off by " << worst;
  return error;
}

constexpr WeightType kTypes[] = {WeightType::kBf16, WeightType::kFp8, WeightType::kFp8Block};

// Clusters need k in equal shares; where they are not, fewer CTAs share a tile.
std::vector<SkinnyPlan> plans(int rows_tile) {
  if (rows_tile == 8) {
    return {{64, 2, 6},
            {64, 4, 3, 128, false, 1, 2, 2},
            {128, 1, 6, 3, true, 1, 1000},
            {64, 2, 4, 0, false, 2},
            {64, 2, 3, 0, false, 4, 6},
            {128, 1, 6, 0, false, 4, 2}};
  }
  if (rows_tile == 16)
    return {{64, 2, 5}, {128, 1, 5, 7, true, 1, 2}, {64, 2, 3, 0, false, 4, 1}, {128, 1, 3, 0, false, 2}};
  if (rows_tile == 32)
    return {{64, 2, 4}, {128, 1, 5, 0, false, 1, 2}, {64, 2, 3, 0, false, 8, 1000}, {128, 1, 3, 0, false, 4}};
  return {{128, 1, 4},
          {128, 1, 8, 5, true, 1, 3},
          {128, 1, 4, 0, false, 2},
          {128, 1, 4, 0, false, 4, 2},
          {128, 1, 2, 0, false, 8, 1000}};
}

TEST(SkinnyGemm, EveryKernelWithRaggedShapes) {
  AOTLLM_NEEDS_GPU();
  const std::pair<int, int> shapes[] = {{1056, 1056}, {160, 4096 + 32}, {12000, 256}, {32, 32},
                                        {128, 128},   {416, 2016},      {1056, 992}};
  double worst = 0.0;
  for (const WeightType type : kTypes) {
    for (const int rows_tile : {8, 16, 32, 64}) {
      for (const SkinnyPlan& plan : plans(rows_tile)) {
        int which = 0;
        for (const auto& [n, k] : shapes) {
          Case c{.type = type, .rows_tile = rows_tile, .n = n, .k = k, .plan = plan};
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

TEST(SkinnyGemm, EveryEpilogueAndNumberOfRows) {
  AOTLLM_NEEDS_GPU();
  double worst = 0.0;
  for (const WeightType type : kTypes) {
    for (const int rows_tile : {8, 16, 32, 64}) {
      for (const Epilogue epilogue : {Epilogue::kStore, Epilogue::kResidual, Epilogue::kGated, Epilogue::kLogits}) {
        for (const bool bias : {false, true}) {
          Case c{.type = type, .rows_tile = rows_tile, .n = 416, .k = 1024, .epilogue = epilogue, .bias = bias};
          c.m = bias ? rows_tile - 1 : rows_tile;
          c.activation = bias ? Activation::kGeluTanh : Activation::kSilu;
          c.softcap = bias && epilogue == Epilogue::kLogits ? 2.0f : 0.0f;
          c.plan.rows = 0;
          worst = std::max(worst, run(c));
        }
      }
    }
  }
  for (int m = 1; m <= 64; m += 3) {
    Case c{.rows_tile = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64, .m = m, .n = 16 * 19, .k = 16 * 37};
    c.plan.rows = 0;
    worst = std::max(worst, run(c));
  }
  std::printf("worst relative error of bf16 results: %.2e\n", worst);
}

TEST(SkinnyGemm, ResidualMayBeTheOutput) {
  AOTLLM_NEEDS_GPU();
  Case c{.rows_tile = 16, .m = 13, .n = 512, .k = 512, .epilogue = Epilogue::kResidual};
  c.plan.rows = 0;
  Instance instance(c);
  make(c, instance.problem)->launch(c.m, {});
  const auto apart = instance.y.download();
  instance.problem.y = instance.residual_data.data();
  make(c, instance.problem)->launch(c.m, {});
  const auto together = instance.residual_data.download();
  EXPECT_EQ(std::memcmp(apart.data(), together.data(), static_cast<std::size_t>(c.m) * c.n * 2), 0);
}

TEST(SkinnyGemm, RowsDoNotDependOnTheirNumber) {
  AOTLLM_NEEDS_GPU();
  Case c{.rows_tile = 64, .m = 64, .n = 1024, .k = 1024, .epilogue = Epilogue::kLogits};
  c.plan.rows = 0;
  Instance instance(c);
  const auto gemm = make(c, instance.problem);
  gemm->launch(64, {});
  const auto all = instance.y.download();
  gemm->launch(3, {});
  EXPECT_EQ(all, instance.y.download());
}

/// x0 → x1 → x2 → x0 …, each launch before its predecessor has ended: the same as one after the other.
TEST(SkinnyGemm, ChainOfProgrammaticLaunches) {
  AOTLLM_NEEDS_GPU();
  for (const int rows_tile : {8, 64}) {
    Case c{.rows_tile = rows_tile, .m = rows_tile, .n = 2048, .k = 2048};
    c.plan.rows = 0;
    Instance a(c), b(c), last(c);
    b.problem.x = a.y.data();
    last.problem.x = b.y.data();
    last.problem.y = a.x_data.data();
    const std::unique_ptr<Gemm> gemms[] = {make(c, a.problem), make(c, b.problem), make(c, last.problem)};
    const auto start = a.x_data.download();
    const auto run_chain = [&](bool programmatic) {
      a.x_data.upload(start);
      cudaStream_t handle;
      check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "stream");
      for (int i = 0; i < 60; ++i) gemms[i % 3]->launch(c.m, {handle, programmatic});
      check(cudaStreamSynchronize(handle), "chain");
      check(cudaStreamDestroy(handle), "stream");
      return a.x_data.download();
    };
    const auto want = run_chain(false);
    EXPECT_NE(want, start);
    for (int i = 0; i < 20; ++i) ASSERT_EQ(want, run_chain(true)) << "tile " << rows_tile << " repetition " << i;
  }
}

TEST(SkinnySplit, DealsOutEveryUnitOnce) {
  for (const bool whole : {false, true}) {
    for (const auto& [tiles, per_tile, ctas] : {std::tuple(332, 64, 132), {4, 3, 3}, {224, 64, 112}, {5, 7, 4}}) {
      const SkinnySplit split(tiles, per_tile, ctas, whole);
      EXPECT_EQ(split.begin(0), 0);
      EXPECT_EQ(split.begin(ctas), tiles * per_tile);
      for (int cta = 0; cta < ctas; ++cta) {
        if (whole) EXPECT_EQ(split.begin(cta) % per_tile, 0);
        for (int unit = split.begin(cta); unit < split.begin(cta + 1); ++unit) ASSERT_EQ(split.owner(unit), cta);
      }
    }
  }
}

}  // namespace
}  // namespace aotllm::cuda
