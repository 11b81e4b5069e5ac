#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device_array.h"
#include "gemm/gemm.h"
#include "reference.h"

namespace aotllm::cuda {
namespace {

struct Shape {
  int m;
  int max_m;
  int n;
  int k;
};

/// The operands of y = f(x Wᵀ) on the device; rows ≥ m of x are NaN.
struct Operands {
  WeightType type;
  Shape shape;
  DeviceArray<Bf16> x16, w16;
  DeviceArray<std::uint8_t> x8, w8;
  DeviceArray<float> x_scales, w_scales, bias;
  std::vector<float> host_bias;

  Operands(WeightType type, const Shape& shape) : type(type), shape(shape) {
    const std::size_t rows = shape.max_m, n = shape.n, k = shape.k, blocks = (k + 127) / 128;
    std::vector<float> x = random_normal(rows * k);
    const std::vector<float> w = random_normal(n * k, 0.5f);
    if (type == WeightType::kBf16) {
      std::fill(x.begin() + static_cast<std::ptrdiff_t>(shape.m * k), x.end(), NAN);
      x16 = DeviceArray<Bf16>(to_bf16(x));
      w16 = DeviceArray<Bf16>(to_bf16(w));
    } else {
      std::vector<std::uint8_t> codes = to_fp8(x);
      std::fill(codes.begin() + static_cast<std::ptrdiff_t>(shape.m * k), codes.end(), std::uint8_t{0x7F});
      x8 = DeviceArray<std::uint8_t>(codes);
      w8 = DeviceArray<std::uint8_t>(to_fp8(w));
      const bool block = type == WeightType::kFp8Block;
      x_scales = positive(block ? rows * blocks : rows);
      w_scales = positive(block ? (n + 127) / 128 * blocks : n);
    }
    host_bias = random_normal(n, 3.0f);
    bias = DeviceArray<float>(host_bias);
  }

  static DeviceArray<float> positive(std::size_t size) {
    std::vector<float> values = random_normal(size);
    for (float& value : values) value = 0.25f + std::abs(value);
    return DeviceArray<float>(values);
  }

  GemmProblem problem() const {
    GemmProblem p;
    p.w = {type,
           shape.n,
           shape.k,
           type == WeightType::kBf16 ? static_cast<const void*>(w16.data()) : w8.data(),
           w_scales.data(),
           nullptr};
    p.x = type == WeightType::kBf16 ? static_cast<const void*>(x16.data()) : x8.data();
    p.x_scales = x_scales.data();
    p.max_m = shape.max_m;
    return p;
  }
};

__device__ double element(Bf16 value) {
  return __bfloat162float(value);
}
__device__ double element(std::uint8_t code) {
  __nv_fp8_e4m3 value;
  value.__x = code;
  return static_cast<float>(value);
}

/// p [m, n] in float64, one thread for each.
template <class T>
__global__ void reference_product(const T* x, const T* w, const float* x_scales, const float* w_scales, int scale_block,
                                  int m, int n, int k, double* p) {
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  if (column >= n) return;
  const int blocks = (k + 127) / 128;
  double sum = 0.0;
  for (int i = 0; i < k; ++i) {
    double term =
        element(x[static_cast<std::size_t>(row) * k + i]) * element(w[static_cast<std::size_t>(column) * k + i]);
    if (scale_block == 128)
      term *= double{x_scales[row * blocks + i / 128]} * w_scales[column / 128 * blocks + i / 128];
    sum += term;
  }
  if (scale_block == 1) sum *= double{x_scales[row]} * w_scales[column];
  p[static_cast<std::size_t>(row) * n + column] = sum;
}

std::vector<double> product(const Operands& o) {
  const Shape& s = o.shape;
  DeviceArray<double> p(static_cast<std::size_t>(s.m) * s.n);
  const dim3 grid((s.n + 127) / 128, s.m);
  if (o.type == WeightType::kBf16) {
    reference_product<<<grid, 128>>>(o.x16.data(), o.w16.data(), nullptr, nullptr, 0, s.m, s.n, s.k, p.data());
  } else {
    reference_product<<<grid, 128>>>(o.x8.data(), o.w8.data(), o.x_scales.data(), o.w_scales.data(),
                                     o.type == WeightType::kFp8Block ? 128 : 1, s.m, s.n, s.k, p.data());
  }
  check(cudaGetLastError(), "reference");
  return p.download();
}

/// What follows the product.
struct Finish {
  const char* name;
  Epilogue epilogue;
  bool bias = false;
  Activation activation = Activation::kSilu;
  bool in_place = false;  // y is the residual
  float softcap = 0.0f;
};
constexpr Finish kFinishes[] = {
    {"store", Epilogue::kStore},
    {"store+bias", Epilogue::kStore, true},
    {"residual", Epilogue::kResidual, true},
    {"residual in place", Epilogue::kResidual, false, Activation::kSilu, true},
    {"silu", Epilogue::kGated, true},
    {"gelu", Epilogue::kGated, false, Activation::kGeluTanh},
    {"logits", Epilogue::kLogits, true},
    {"softcap", Epilogue::kLogits, false, Activation::kSilu, false, 30.0f},
};

double activate(double x, Activation activation) {
  if (activation == Activation::kSilu) return x / (1.0 + std::exp(-x));
  return 0.5 * x * (1.0 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

int width(const Finish& f, int n) {
  return f.epilogue == Epilogue::kGated ? n / 2 : n;
}

std::vector<double> expected(const Operands& o, const Finish& f, const std::vector<double>& products,
                             const std::vector<Bf16>& residual) {
  const int n = o.shape.n;
  const int out = width(f, n);
  std::vector<double> y(static_cast<std::size_t>(o.shape.m) * out);
  for (int row = 0; row < o.shape.m; ++row) {
    const auto p = [&](int column) {
      return products[static_cast<std::size_t>(row) * n + column] + (f.bias ? o.host_bias[column] : 0.0f);
    };
    for (int j = 0; j < out; ++j) {
      double& to = y[static_cast<std::size_t>(row) * out + j];
      if (f.epilogue == Epilogue::kGated) {
        const int gate = j / 8 * 16 + j % 8;
        to = activate(p(gate), f.activation) * p(gate + 8);
      } else {
        to = p(j);
        if (f.epilogue == Epilogue::kResidual) to += from_bf16(residual[static_cast<std::size_t>(row) * out + j]);
        if (f.softcap > 0.0f) to = f.softcap * std::tanh(to / f.softcap);
      }
    }
  }
  return y;
}

Workspace workspace() {
  static const DeviceArray<std::uint8_t> memory = [] {
    DeviceArray<std::uint8_t> made(kWorkspaceBytes);
    made.fill(0);
    return made;
  }();
  return {memory.data(), memory.size()};
}

/// Tiles of SM90, then those of SM80.
int num_tiles() {
  return num_gemm_tiles() + num_sm80_shapes();
}
std::unique_ptr<Gemm> make_gemm(const GemmProblem& problem, int tile) {
  const int sm80 = tile - num_gemm_tiles();
  return sm80 < 0 ? make_tile_gemm(problem, tile, workspace()) : make_sm80_gemm(problem, sm80, workspace());
}

/// The output of one launch, and whether what it must not touch is as it was.
struct Output {
  std::vector<double> y;
  std::vector<std::uint8_t> bytes;
  bool rest_untouched = true;
};

Output run(const Operands& o, const Finish& f, int tile, const DeviceArray<Bf16>& residual, bool& exists) {
  const int out = width(f, o.shape.n);
  const std::size_t size = f.epilogue == Epilogue::kLogits ? 4 : 2;
  const std::size_t used = static_cast<std::size_t>(o.shape.m) * out * size;
  DeviceArray<std::uint8_t> y(static_cast<std::size_t>(o.shape.max_m) * out * size + 4096);
  y.fill(0xFF);
  if (f.in_place) check(cudaMemcpy(y.data(), residual.data(), used, cudaMemcpyDeviceToDevice), "copy");
  GemmProblem problem = o.problem();
  problem.epilogue = f.epilogue;
  problem.activation = f.activation;
  problem.softcap = f.softcap;
  problem.bias = f.bias ? o.bias.data() : nullptr;
  problem.y = y.data();
  problem.residual = f.in_place ? reinterpret_cast<const Bf16*>(y.data()) : residual.data();
  const std::unique_ptr<Gemm> gemm = make_gemm(problem, tile);
  exists = gemm != nullptr;
  Output result;
  if (!exists) return result;
  gemm->launch(o.shape.m, {});
  result.bytes = y.download();
  for (std::size_t i = used; i < result.bytes.size(); ++i) result.rest_untouched &= result.bytes[i] == 0xFF;
  result.y.resize(static_cast<std::size_t>(o.shape.m) * out);
  for (std::size_t i = 0; i < result.y.size(); ++i) {
    if (size == 4) {
      float value;
      std::memcpy(&value, &result.bytes[4 * i], 4);
      result.y[i] = value;
    } else {
      Bf16 value;
      std::memcpy(&value, &result.bytes[2 * i], 2);
      result.y[i] = from_bf16(value);
    }
  }
  return result;
}

/// Where the first value far from the expected one is, in words.
std::string first_bad(const std::vector<double>& got, const std::vector<double>& want, int width, double scale) {
  std::size_t bad = 0;
  std::size_t first = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::abs(got[i] - want[i]) <= 0.05 * scale + 0.02 * std::abs(want[i])) continue;
    if (bad++ == 0) first = i;
  }
  if (bad == 0) return "none far off";
  return std::to_string(bad) + " of " + std::to_string(got.size()) + " bad, first [" + std::to_string(first / width) +
         ", " + std::to_string(first % width) + "] got " + std::to_string(got[first]) + " want " +
         std::to_string(want[first]);
}

double rms(const std::vector<double>& values) {
  double sum = 0.0;
  for (double value : values) sum += value * value;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

const char* name_of(WeightType type) {
  return type == WeightType::kBf16 ? "bf16" : type == WeightType::kFp8 ? "fp8" : "fp8_block";
}

/// Every tile at one shape.
void check_shape(WeightType type, const Shape& shape, std::span<const Finish> finishes = kFinishes) {
  const Operands operands(type, shape);
  const std::vector<double> products = product(operands);
  const std::vector<Bf16> residual_values = random_bf16(static_cast<std::size_t>(shape.max_m) * shape.n, 10.0f);
  const DeviceArray<Bf16> residual(residual_values);
  double worst = 0.0;
  for (const Finish& f : finishes) {
    const std::vector<double> want = expected(operands, f, products, residual_values);
    const double scale = rms(want);
    for (int tile = 0; tile < num_tiles(); ++tile) {
      bool exists = false;
      const Output got = run(operands, f, tile, residual, exists);
      if (!exists) continue;
      const double error = relative_error(got.y, want);
      worst = std::max(worst, error);
      // Rounding to bf16 is 1.7e-3 on average; FP8 tensor cores keep about 14 bits of a sum.
      const double rounding = f.epilogue == Epilogue::kLogits ? 1e-4 : 2.5e-3;
      const double allowed = rounding + (type == WeightType::kBf16 ? 0.0 : 3e-3);
      EXPECT_LT(error, allowed) << name_of(type) << " tile " << tile << " " << f.name << " m " << shape.m << " n "
                                << shape.n << " k " << shape.k << ": "
                                << first_bad(got.y, want, width(f, shape.n), scale);
      EXPECT_TRUE(got.rest_untouched) << name_of(type) << " tile " << tile << " " << f.name
                                      << " rows from m on changed";
      const Output again = run(operands, f, tile, residual, exists);
      EXPECT_TRUE(got.bytes == again.bytes) << name_of(type) << " tile " << tile << " " << f.name << " differs by run";
    }
  }
  std::printf("%s m %d n %d k %d: worst relative error %.2e\n", name_of(type), shape.m, shape.n, shape.k, worst);
  std::fflush(stdout);
}

class TileGemmTest : public testing::TestWithParam<WeightType> {};

TEST_P(TileGemmTest, OneRow) {
  AOTLLM_NEEDS_GPU();
  check_shape(GetParam(), {1, 8, 64, 32});
}
TEST_P(TileGemmTest, RaggedRowsColumnsAndDepth) {
  AOTLLM_NEEDS_GPU();
  check_shape(GetParam(), {65, 72, 960, 576});
  check_shape(GetParam(), {129, 136, 208, 1120});
  check_shape(GetParam(), {203, 512, 784, 96});
}
TEST_P(TileGemmTest, ManyTilesForEachCta) {
  AOTLLM_NEEDS_GPU();
  check_shape(GetParam(), {520, 528, 8208, 448}, std::span(kFinishes).subspan(3, 2));
  check_shape(GetParam(), {130, 136, 17424, 64}, std::span(kFinishes).subspan(1, 2));
  check_shape(GetParam(), {130, 136, 17424, 160}, std::span(kFinishes).subspan(6, 1));
}
/// Fewer blocks of k than parts of the sum.
TEST_P(TileGemmTest, ShortSums) {
  AOTLLM_NEEDS_GPU();
  check_shape(GetParam(), {300, 304, 544, 32});
  check_shape(GetParam(), {140, 144, 544, 160});
}
TEST_P(TileGemmTest, WholeTiles) {
  AOTLLM_NEEDS_GPU();
  check_shape(GetParam(), {256, 256, 1536, 4096});
}

/// A chain that starts early gives what one by one gives: y2 = y1 + W x, back and forth.
TEST(TileGemmTest, ProgrammaticLaunchesWaitForEachOther) {
  AOTLLM_NEEDS_GPU();
  const int m = 130, width = 1024;
  const std::vector<Bf16> x = random_bf16(static_cast<std::size_t>(m + 6) * width, 1.0f);
  const DeviceArray<Bf16> w(random_bf16(static_cast<std::size_t>(width) * width, 0.03f));
  for (int tile = 0; tile < num_tiles(); ++tile) {
    DeviceArray<Bf16> a(x), b(x);
    GemmProblem problem;
    problem.w = {WeightType::kBf16, width, width, w.data(), nullptr, nullptr};
    problem.max_m = m + 6;
    problem.epilogue = Epilogue::kResidual;
    problem.x = a.data();
    problem.y = b.data();
    problem.residual = b.data();
    const auto forth = make_gemm(problem, tile);
    problem.x = b.data();
    problem.y = a.data();
    problem.residual = a.data();
    const auto back = make_gemm(problem, tile);
    std::vector<std::vector<Bf16>> results;
    const bool sm90 = tile < num_gemm_tiles();  // others wait for their predecessors anyway
    for (bool programmatic : {false, sm90}) {
      a.upload(x);
      b.upload(x);
      cudaStream_t stream;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      check(cudaDeviceSynchronize(), "uploads");
      for (int i = 0; i < 6; ++i) {
        forth->launch(m, {stream, programmatic});
        back->launch(m, {stream, programmatic});
      }
      check(cudaStreamSynchronize(stream), "chain");
      check(cudaStreamDestroy(stream), "destroy");
      results.push_back(a.download());
    }
    EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), results[0].size() * sizeof(Bf16)), 0)
        << "tile " << tile;
  }
}

TEST(TileGemmTest, RefusesOtherProblems) {
  GemmProblem problem;
  problem.max_m = 128;
  problem.w = {WeightType::kInt8, 128, 128, nullptr, nullptr, nullptr};
  EXPECT_EQ(make_tile_gemm(problem, 0, {}), nullptr);
  problem.w = {WeightType::kBf16, 120, 128, nullptr, nullptr, nullptr};
  EXPECT_EQ(make_tile_gemm(problem, 0, {}), nullptr);
  problem.w = {WeightType::kFp8, 128, 48, nullptr, nullptr, nullptr};
  EXPECT_EQ(make_tile_gemm(problem, 0, {}), nullptr);
  problem.w = {WeightType::kBf16, 128, 128, nullptr, nullptr, nullptr};
  EXPECT_EQ(make_tile_gemm(problem, num_gemm_tiles(), {}), nullptr);
  EXPECT_EQ(make_tile_gemm(problem, -1, {}), nullptr);
}

TEST(Sm80GemmTest, RefusesOtherProblems) {
  GemmProblem problem;
  problem.max_m = 128;
  problem.w = {WeightType::kInt8, 128, 128, nullptr, nullptr, nullptr};
  EXPECT_EQ(make_sm80_gemm(problem, 0, {}), nullptr);
  problem.w = {WeightType::kFp8Block, 128, 128, nullptr, nullptr, nullptr};
  EXPECT_EQ(make_sm80_gemm(problem, 0, {}), nullptr);
  problem.w = {WeightType::kBf16, 120, 128, nullptr, nullptr, nullptr};
  EXPECT_EQ(make_sm80_gemm(problem, 0, {}), nullptr);
  problem.w = {WeightType::kFp8, 128, 48, nullptr, nullptr, nullptr};
  EXPECT_EQ(make_sm80_gemm(problem, 0, {}), nullptr);
  problem.w = {WeightType::kBf16, 128, 128, nullptr, nullptr, nullptr};
  EXPECT_EQ(make_sm80_gemm(problem, num_sm80_shapes(), {}), nullptr);
  EXPECT_EQ(make_sm80_gemm(problem, -1, {}), nullptr);
}

/// Shape 0 gives a row the same bits among any number of others.
TEST(Sm80GemmTest, RowsOfShape0DoNotDependOnTheirNumber) {
  AOTLLM_NEEDS_GPU();
  const Shape shape{300, 304, 1040, 2064};
  const Operands operands(WeightType::kBf16, shape);
  GemmProblem problem = operands.problem();
  DeviceArray<Bf16> y(static_cast<std::size_t>(shape.max_m) * shape.n);
  problem.y = y.data();
  const auto gemm = make_sm80_gemm(problem, 0, workspace());
  gemm->launch(shape.m, {nullptr, false, 80});
  const std::vector<Bf16> all = y.download();
  for (const int m : {1, 7, 128, 129}) {
    y.fill(0xFF);
    gemm->launch(m, {nullptr, false, 80});
    const std::vector<Bf16> some = y.download();
    EXPECT_EQ(std::memcmp(all.data(), some.data(), sizeof(Bf16) * static_cast<std::size_t>(m) * shape.n), 0) << m;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, TileGemmTest,
                         testing::Values(WeightType::kBf16, WeightType::kFp8, WeightType::kFp8Block),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace aotllm::cuda
