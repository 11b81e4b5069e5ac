#include "gemm/layer_gemms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "reference.h"

namespace aotllm::cuda {
namespace {

struct Case {
  int rows_tile = 8;
  int m = 1;
  int heads_width = 256;  // k of the first linear
  int hidden = 256;
  int inner = 256;
  int qkv = 384;  // 0 = the chain ends with the residual stream
  bool bias = false;
  Activation activation = Activation::kSilu;
};

std::string describe(const Case& c) {
  return "tile " + std::to_string(c.rows_tile) + " m " + std::to_string(c.m) + " widths " +
         std::to_string(c.heads_width) + " " + std::to_string(c.hidden) + " " + std::to_string(c.inner) + " " +
         std::to_string(c.qkv) + (c.bias ? " bias" : "");
}

using Rows = std::vector<std::vector<double>>;  // [m][width]

double round_bf16(double value) {
  return from_bf16(__float2bfloat16_rn(static_cast<float>(value)));
}

/// What group codes make of a row.
void round_codes(std::vector<double>& row) {
  for (std::size_t first = 0; first < row.size(); first += kCodeGroup) {
    double largest = 0.0;
    for (std::size_t i = first; i < first + kCodeGroup; ++i) largest = std::max(largest, std::abs(row[i]));
    if (largest == 0.0) continue;
    const double scale = largest / 448.0;
    for (std::size_t i = first; i < first + kCodeGroup; ++i) {
      const auto code = __nv_cvt_float_to_fp8(static_cast<float>(row[i] / scale), __NV_SATFINITE, __NV_E4M3);
      row[i] = from_fp8(code) * scale;
    }
  }
}

/// A linear on the device, and its exact values.
struct Linear {
  int n = 0;
  int k = 0;
  std::vector<double> w, bias;
  DeviceArray<std::uint8_t> data;
  DeviceArray<float> scales, bias_data;

  Linear(int n, int k, bool has_bias) : n(n), k(k), w(static_cast<std::size_t>(n) * k) {
    const float unit = 1.0f / std::sqrt(static_cast<float>(k));
    std::vector<float> row_scales(static_cast<std::size_t>(n));
    std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
    for (float& scale : row_scales) scale = unit / 16.0f * uniform(random_engine());
    const auto codes = to_fp8(random_normal(w.size(), 16.0f));
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = from_fp8(codes[i]) * row_scales[i / static_cast<std::size_t>(k)];
    data = DeviceArray<std::uint8_t>(codes);
    scales = DeviceArray<float>(row_scales);
    bias.assign(static_cast<std::size_t>(n), 0.0);
    if (!has_bias) return;
    const auto biases = random_normal(static_cast<std::size_t>(n));
    std::copy(biases.begin(), biases.end(), bias.begin());
    bias_data = DeviceArray<float>(biases);
  }

  Weights weights() const { return {WeightType::kFp8, n, k, data.data(), scales.data(), nullptr}; }

  Rows times(const Rows& x) const {
    Rows y(x.size(), bias);
    for (std::size_t token = 0; token < x.size(); ++token) {
      for (int row = 0; row < n; ++row) {
        const double* from = w.data() + static_cast<std::size_t>(row) * k;
        double sum = 0.0;
        for (int i = 0; i < k; ++i) sum += from[i] * x[token][static_cast<std::size_t>(i)];
        y[token][static_cast<std::size_t>(row)] += sum;
      }
    }
    return y;
  }
};

/// Results as the device has them.
struct Outcome {
  std::vector<Bf16> between, out, qkv;
};

struct Layer {
  Case c;
  Linear output, gate_up, down, qkv;
  std::vector<float> norms[2];
  std::vector<Bf16> residual;
  Rows x;
  DeviceArray<Bf16> residual_data, between, out, qkv_data;
  DeviceArray<float> norm_data[2];
  DeviceArray<std::uint8_t> codes;  ///< input of the first linear
  DeviceArray<float> scales;
  DeviceArray<std::uint8_t> workspace{kWorkspaceBytes};
  std::vector<LayerProblem> problems;
  std::unique_ptr<LayerScratch> scratch;
  std::unique_ptr<LayerGemms> gemms;

  static constexpr int kMaxRows = kLayerMaxRows;
  static constexpr float kEps = 1e-5f;

  explicit Layer(const Case& from)
      : c(from),
        output(c.hidden, c.heads_width, c.bias),
        gate_up(2 * c.inner, c.hidden, c.bias),
        down(c.hidden, c.inner, c.bias),
        qkv(std::max(c.qkv, 64), c.hidden, c.bias),
        residual(random_bf16(static_cast<std::size_t>(kMaxRows) * c.hidden)),
        residual_data(residual),
        between(residual.size()),
        out(residual.size()),
        qkv_data(static_cast<std::size_t>(kMaxRows) * qkv.n) {
    for (int i = 0; i < 2; ++i) {
      norms[i] = random_normal(static_cast<std::size_t>(c.hidden));
      norm_data[i] = DeviceArray<float>(norms[i]);
    }
    for (DeviceArray<Bf16>* array : {&between, &out, &qkv_data}) array->fill(0xFF);
    LayerProblem problem;
    problem.activation = c.activation;
    const auto add = [&](const Linear& linear, Epilogue epilogue, const Bf16* residual_of, Bf16* y, int norm) {
      problem.linears.push_back({linear.weights(), linear.bias_data.data(), epilogue, residual_of, y,
                                 norm < 0 ? nullptr : norm_data[norm].data(), kEps});
    };
    add(output, Epilogue::kResidual, residual_data.data(), between.data(), 0);
    add(gate_up, Epilogue::kGated, nullptr, nullptr, -1);
    add(down, Epilogue::kResidual, between.data(), out.data(), c.qkv > 0 ? 1 : -1);
    if (c.qkv > 0) add(qkv, Epilogue::kStore, nullptr, qkv_data.data(), -1);
    problems.push_back(problem);
    scratch = std::make_unique<LayerScratch>(problems);
    set_input();
    gemms = make_layer_gemms(problems[0], c.rows_tile, *scratch, {workspace.data(), workspace.bytes()});
  }

  /// Rows from m on hold NaN.
  void set_input() {
    const auto size = static_cast<std::size_t>(c.m) * c.heads_width;
    x.assign(static_cast<std::size_t>(c.m), std::vector<double>(static_cast<std::size_t>(c.heads_width)));
    auto drawn = to_fp8(random_normal(size, 16.0f));
    std::vector<float> drawn_scales(static_cast<std::size_t>(c.heads_width / kCodeGroup) * c.rows_tile, NAN);
    std::uniform_real_distribution<float> uniform(0.02f, 0.1f);
    for (int token = 0; token < c.m; ++token) {
      for (int i = 0; i < c.heads_width; ++i) {
        float& scale = drawn_scales[static_cast<std::size_t>(i / kCodeGroup * c.rows_tile + token)];
        if (i % kCodeGroup == 0) scale = uniform(random_engine());
        x[token][i] = from_fp8(drawn[static_cast<std::size_t>(token) * c.heads_width + i]) * scale;
      }
    }
    drawn.resize(static_cast<std::size_t>(kMaxRows) * c.heads_width, 0xFF);
    codes = DeviceArray<std::uint8_t>(drawn);
    scales = DeviceArray<float>(drawn_scales);
  }

  Rows normed(const Rows& rows, const std::vector<float>& weight) const {
    Rows y = rows;
    for (std::vector<double>& row : y) {
      double squares = 0.0;
      for (const double value : row) squares += value * value;
      const double inverse = 1.0 / std::sqrt(squares / static_cast<double>(row.size()) + kEps);
      for (std::size_t i = 0; i < row.size(); ++i) row[i] *= weight[i];
      round_codes(row);
      for (double& value : row) value *= inverse;
    }
    return y;
  }
  double activate(double gate) const {
    if (c.activation == Activation::kSilu) return gate / (1.0 + std::exp(-gate));
    return gate / 2.0 * (1.0 + std::tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)));
  }

  struct Wanted {
    Rows between, out, qkv;
  };
  Wanted want() const {
    Wanted wanted;
    wanted.between = output.times(x);
    for (std::size_t t = 0; t < wanted.between.size(); ++t) {
      for (int i = 0; i < c.hidden; ++i) {
        double& value = wanted.between[t][static_cast<std::size_t>(i)];
        value = round_bf16(value + from_bf16(residual[t * static_cast<std::size_t>(c.hidden) + i]));
      }
    }
    const Rows gates = gate_up.times(normed(wanted.between, norms[0]));
    Rows acts(gates.size(), std::vector<double>(static_cast<std::size_t>(c.inner)));
    for (std::size_t t = 0; t < gates.size(); ++t) {
      for (int j = 0; j < c.inner; ++j) {
        const std::size_t row = static_cast<std::size_t>(j / 8 * 16 + j % 8);
        acts[t][static_cast<std::size_t>(j)] = activate(gates[t][row]) * gates[t][row + 8];
      }
      round_codes(acts[t]);
    }
    wanted.out = down.times(acts);
    for (std::size_t t = 0; t < wanted.out.size(); ++t) {
      for (std::size_t i = 0; i < wanted.out[t].size(); ++i) {
        wanted.out[t][i] = round_bf16(wanted.out[t][i] + wanted.between[t][i]);
      }
    }
    if (c.qkv > 0) wanted.qkv = qkv.times(normed(wanted.out, norms[1]));
    return wanted;
  }

  void launch(const Stream& stream = {}) const {
    const GroupCodes input = scratch->input(0, c.rows_tile);  // down's input has overwritten them
    const auto copy = cudaMemcpyDeviceToDevice;
    check(cudaMemcpyAsync(input.codes, codes.data(), codes.bytes(), copy, stream.handle), "x");
    check(cudaMemcpyAsync(input.scales, scales.data(), scales.bytes(), copy, stream.handle), "x");
    gemms->launch(c.m, stream);
  }
  Outcome outcome() const { return {between.download(), out.download(), qkv_data.download()}; }
};

double error_of(const std::vector<Bf16>& got, const Rows& want) {
  std::vector<double> ours, theirs;
  for (std::size_t t = 0; t < want.size(); ++t) {
    for (std::size_t i = 0; i < want[t].size(); ++i) {
      ours.push_back(from_bf16(got[t * want[t].size() + i]));
      theirs.push_back(want[t][i]);
    }
  }
  return relative_error(ours, theirs);
}

bool same(const std::vector<Bf16>& a, const std::vector<Bf16>& b, std::size_t count) {
  return std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(count), b.begin(),
                    [](Bf16 x, Bf16 y) { return __bfloat16_as_ushort(x) == __bfloat16_as_ushort(y); });
}

void expect_right(const Case& c) {
  SCOPED_TRACE(describe(c));
  const Layer layer(c);
  ASSERT_NE(layer.gemms, nullptr);
  layer.launch();
  const Outcome got = layer.outcome();
  const Layer::Wanted wanted = layer.want();
  // Values that differ by d, relatively, fall into another code as often as d / s, where s ≈ 0.09 is what codes differ
  // by: an error of √(d · s), which is 0.01 where d is that of bf16.
  EXPECT_LT(error_of(got.between, wanted.between), 0.004);
  EXPECT_LT(error_of(got.out, wanted.out), 0.015);
  if (c.qkv > 0) EXPECT_LT(error_of(got.qkv, wanted.qkv), 0.03);
  const auto untouched = [&](const std::vector<Bf16>& rows, int width) {
    return std::all_of(rows.begin() + static_cast<std::ptrdiff_t>(c.m) * width, rows.end(),
                       [](Bf16 value) { return __bfloat16_as_ushort(value) == 0xFFFF; });
  };
  EXPECT_TRUE(untouched(got.between, c.hidden));
  EXPECT_TRUE(untouched(got.out, c.hidden));
  EXPECT_TRUE(untouched(got.qkv, layer.qkv.n));
}

TEST(LayerGemms, MatchFloat64) {
  AOTLLM_NEEDS_GPU();
  for (const int tile : {8, 16}) {
    expect_right({tile, tile, 256, 256, 256, 384});
    expect_right({tile, 1, 576, 576, 1536, 960});                                 // SmolLM2: k of no whole stages
    expect_right({tile, 5, 1024, 512, 1376, 0, true});                            // no QKV
    expect_right({tile, tile - 1, 96, 64, 32, 64, true, Activation::kGeluTanh});  // fewer units than CTAs
    expect_right({tile, 3, 2048, 2048, 2816, 3072, true});
  }
}

TEST(LayerGemms, MatchFloat64AtTheSizesOfLlama) {
  AOTLLM_NEEDS_GPU();
  expect_right({8, 1, 4096, 4096, 14336, 6144});
}

TEST(LayerGemms, RowsStandAlone) {
  AOTLLM_NEEDS_GPU();
  Layer layer({16, 16, 576, 576, 1536, 960, true});
  layer.launch();
  const Outcome all = layer.outcome();
  layer.c.m = 3;
  layer.launch();
  const Outcome few = layer.outcome();
  EXPECT_TRUE(same(all.between, few.between, 3 * 576));
  EXPECT_TRUE(same(all.out, few.out, 3 * 576));
  EXPECT_TRUE(same(all.qkv, few.qkv, 3 * 960));
}

/// Infinities and NaN stay in their row, and nothing of them is left in the scratch: a width that fills no whole stage
/// is followed by scales that a wider linear has left.
TEST(LayerGemms, DamagedRowsDamageNoOthers) {
  AOTLLM_NEEDS_GPU();
  const Layer layer({8, 4, 576, 576, 1536, 960});
  layer.launch();
  const Outcome sound = layer.outcome();
  std::vector<Bf16> damaged = layer.residual;
  for (std::size_t i = 0; i < 576; ++i) damaged[576 + i] = __float2bfloat16_rn(i % 2 == 0 ? INFINITY : NAN);
  check(cudaMemcpy(layer.residual_data.data(), damaged.data(), 2 * damaged.size(), cudaMemcpyHostToDevice), "residual");
  layer.launch();
  const Outcome other = layer.outcome();
  for (const std::size_t row : {0, 2, 3}) {
    EXPECT_TRUE(std::equal(sound.qkv.begin() + row * 960, sound.qkv.begin() + row * 960 + 960,
                           other.qkv.begin() + row * 960,
                           [](Bf16 x, Bf16 y) { return __bfloat16_as_ushort(x) == __bfloat16_as_ushort(y); }))
        << row;
  }
  EXPECT_FALSE(std::isfinite(from_bf16(other.qkv[960])));
  check(cudaMemcpy(layer.residual_data.data(), layer.residual.data(), 2 * damaged.size(), cudaMemcpyHostToDevice),
        "residual");
  layer.launch();
  EXPECT_TRUE(same(sound.qkv, layer.outcome().qkv, 4 * 960));
}

/// As layers follow each other in a step: as often as there is a chance for a CTA to run ahead.
TEST(LayerGemms, RepeatInGraphsWithProgrammaticLaunches) {
  AOTLLM_NEEDS_GPU();
  for (const int width : {256, 2048}) {
    const Layer layer({8, 7, width, width, 2 * width, width});
    layer.launch();
    const Outcome first = layer.outcome();
    cudaStream_t handle = nullptr;
    check(cudaStreamCreate(&handle), "stream");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < 20; ++i) layer.launch({handle, true});
    check(cudaStreamEndCapture(handle, &graph), "capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "graph");
    for (int i = 0; i < 20; ++i) check(cudaGraphLaunch(executable, handle), "graph");
    check(cudaStreamSynchronize(handle), "graph");
    const Outcome last = layer.outcome();
    EXPECT_TRUE(same(first.qkv, last.qkv, static_cast<std::size_t>(7 * width)));
    EXPECT_TRUE(same(first.out, last.out, static_cast<std::size_t>(7 * width)));
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(handle);
  }
}

}  // namespace
}  // namespace aotllm::cuda
