#include <cstdlib>
#include <cstring>

#include "elementwise_check.h"
#include "gemm/cublaslt_library.h"
#include "gemm/gemm.h"

namespace aotllm::cuda {
namespace {

// AOTLLM_CUBLASLT names the library where the linker does not find it.
std::shared_ptr<CublasLtLibrary> library() {
  const char* path = std::getenv("AOTLLM_CUBLASLT");
  return open_cublaslt(path != nullptr ? path : "");
}

struct Case {
  WeightType type;
  int n;
  int k;
  Epilogue epilogue;
  bool bias = false;
  bool in_place = false;  // y is the residual
  float softcap = 0.0f;
  Activation activation = Activation::kSilu;
  std::size_t workspace_bytes = kWorkspaceBytes;

  std::string name() const {
    return std::string(type == WeightType::kFp8 ? "fp8 " : "bf16 ") + std::to_string(n) + "x" + std::to_string(k) +
           " epilogue " + std::to_string(static_cast<int>(epilogue)) + (bias ? " bias" : "") +
           (in_place ? " in place" : "");
  }
};

constexpr int kMaxRows = 520;

// A linear of random values and its result in float64.
class Linear {
 public:
  explicit Linear(const Case& c) : case_(c), fp8_(c.type == WeightType::kFp8) {
    fill(c.n, w_, device_w_, w_scales_);
    fill(kMaxRows, x_, device_x_, x_scales_);
    device_w_scales_ = DeviceArray<float>(w_scales_);
    device_x_scales_ = DeviceArray<float>(x_scales_);
    bias_ = random_normal(c.n);
    device_bias_ = DeviceArray<float>(bias_);
    residual_ = random_bf16(static_cast<std::size_t>(kMaxRows) * c.n);
    device_residual_ = DeviceArray<Bf16>(residual_);
    y_ = DeviceArray<std::uint8_t>(static_cast<std::size_t>(kMaxRows) * row_bytes());
    workspace_ = DeviceArray<std::uint8_t>(c.workspace_bytes);
    workspace_.fill(0);
  }

  int width() const { return case_.epilogue == Epilogue::kGated ? case_.n / 2 : case_.n; }
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(width()) * (case_.epilogue == Epilogue::kLogits ? 4 : 2);
  }
  Workspace workspace() const { return {workspace_.data(), workspace_.bytes()}; }
  GemmProblem problem() const {
    GemmProblem p;
    p.w = {case_.type, case_.n, case_.k, device_w_.data(), fp8_ ? device_w_scales_.data() : nullptr, nullptr};
    p.x = device_x_.data();
    if (fp8_) p.x_scales = device_x_scales_.data();
    p.max_m = kMaxRows;
    if (case_.bias) p.bias = device_bias_.data();
    p.epilogue = case_.epilogue;
    p.activation = case_.activation;
    p.residual = device_residual_.data();
    p.y = case_.in_place ? static_cast<void*>(device_residual_.data()) : y_.data();
    p.softcap = case_.softcap;
    return p;
  }
  void reset() {
    y_.fill(0xFF);
    device_residual_.upload(residual_);
  }

  std::vector<std::uint8_t> result() const {
    if (!case_.in_place) return y_.download();
    const std::vector<Bf16> values = device_residual_.download();
    const auto bytes = bytes_from(values, 0);
    return {bytes.begin(), bytes.end()};
  }
  double value(const std::vector<std::uint8_t>& result, int row, int column) const {
    const std::uint8_t* at = result.data() + row * row_bytes();
    if (case_.epilogue == Epilogue::kLogits) {
      float logit;
      std::memcpy(&logit, at + column * 4, sizeof logit);
      return logit;
    }
    Bf16 rounded;
    std::memcpy(&rounded, at + column * 2, sizeof rounded);
    return from_bf16(rounded);
  }

  double reference(int row, int column) const {
    switch (case_.epilogue) {
      case Epilogue::kGated: {
        const int gate_row = column / 8 * 16 + column % 8;
        const double gate = product(row, gate_row);
        const double cubic = std::sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate);
        const double active = case_.activation == Activation::kSilu ? gate / (1.0 + std::exp(-gate))
                                                                    : 0.5 * gate * (1.0 + std::tanh(cubic));
        return active * product(row, gate_row + 8);
      }
      case Epilogue::kResidual:
        return product(row, column) + from_bf16(residual_[static_cast<std::size_t>(row) * case_.n + column]);
      case Epilogue::kLogits: {
        const double logit = product(row, column);
        return case_.softcap > 0.0f ? case_.softcap * std::tanh(logit / case_.softcap) : logit;
      }
      default:
        return product(row, column);
    }
  }
  bool rows_untouched(const std::vector<std::uint8_t>& result, int first) const {
    const auto rest = std::span(result).subspan(first * row_bytes());
    if (!case_.in_place) return untouched(rest);
    return std::memcmp(rest.data(), residual_.data() + static_cast<std::size_t>(first) * case_.n, rest.size()) == 0;
  }

 private:
  // Values of about 1 / k^(1/4), so that products are of about 1.
  void fill(int rows, std::vector<float>& values, DeviceArray<std::uint8_t>& device, std::vector<float>& scales) {
    const float sigma = std::pow(static_cast<float>(case_.k), -0.25f);
    values = random_normal(static_cast<std::size_t>(rows) * case_.k, fp8_ ? 30.0f : sigma);
    scales = random_normal(rows, 0.3f);
    for (float& scale : scales) scale = (1.0f + std::abs(scale)) * sigma / 30.0f;
    if (fp8_) {
      const std::vector<std::uint8_t> codes = to_fp8(values);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(from_fp8(codes[i]));
      device = DeviceArray<std::uint8_t>(codes);
      return;
    }
    const std::vector<Bf16> rounded = to_bf16(values);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = __bfloat162float(rounded[i]);
    device = DeviceArray<std::uint8_t>(bytes_from(rounded, 0));
  }
  double product(int row, int w_row) const {
    double sum = 0.0;
    const float* x = x_.data() + static_cast<std::size_t>(row) * case_.k;
    const float* w = w_.data() + static_cast<std::size_t>(w_row) * case_.k;
    for (int i = 0; i < case_.k; ++i) sum += static_cast<double>(x[i]) * w[i];
    if (fp8_) sum *= static_cast<double>(x_scales_[row]) * w_scales_[w_row];
    return sum + (case_.bias ? bias_[w_row] : 0.0);
  }

  const Case case_;
  const bool fp8_;
  std::vector<float> w_, x_, w_scales_, x_scales_, bias_;
  std::vector<Bf16> residual_;
  DeviceArray<std::uint8_t> device_w_, device_x_, y_, workspace_;
  DeviceArray<float> device_w_scales_, device_x_scales_, device_bias_;
  DeviceArray<Bf16> device_residual_;
};

void compare(const Case& c, const Linear& linear, const std::vector<std::uint8_t>& result, int m) {
  std::vector<double> got;
  std::vector<double> want;
  for (int i = 0; i < 1500; ++i) {
    const int row = static_cast<int>(random_engine()() % m);
    const int column = static_cast<int>(random_engine()() % linear.width());
    got.push_back(linear.value(result, row, column));
    want.push_back(linear.reference(row, column));
  }
  const double error = relative_error(got, want);
  const bool fp8 = c.type == WeightType::kFp8;
  // Gate and up are rounded once more before they meet.
  const double allowed = c.epilogue == Epilogue::kGated    ? 1e-2
                         : fp8                             ? 6e-3
                         : c.epilogue == Epilogue::kLogits ? 1e-4
                                                           : 4e-3;
  EXPECT_LE(error, allowed) << c.name() << " m " << m;
  EXPECT_TRUE(linear.rows_untouched(result, m)) << c.name() << " m " << m;
}

void run_case(const std::shared_ptr<CublasLtLibrary>& lt, const Case& c) {
  Linear linear(c);
  const std::unique_ptr<Gemm> gemm = make_cublaslt_gemm(lt, linear.problem(), linear.workspace());
  ASSERT_NE(gemm, nullptr) << c.name();
  for (const int m : {1, 3, 8, 17, 64, 100, 300, kMaxRows}) {
    linear.reset();
    gemm->launch(m, Stream{});
    compare(c, linear, linear.result(), m);
  }
}

#define AOTLLM_NEEDS_CUBLASLT(lt) \
  AOTLLM_NEEDS_GPU();             \
  const auto lt = library();      \
  if (lt == nullptr) GTEST_SKIP() << "no cuBLASLt"

TEST(CublasLt, EveryEpilogueAndType) {
  AOTLLM_NEEDS_CUBLASLT(lt);
  std::printf("cuBLASLt %zu\n", lt->version());
  for (const WeightType type : {WeightType::kBf16, WeightType::kFp8}) {
    for (const bool bias : {false, true}) {
      run_case(lt, {type, 768, 512, Epilogue::kStore, bias});
      run_case(lt, {type, 768, 512, Epilogue::kResidual, bias});
      run_case(lt, {type, 768, 512, Epilogue::kResidual, bias, true});
      run_case(lt, {type, 768, 512, Epilogue::kGated, bias});
      run_case(lt, {type, 1008, 4096, Epilogue::kLogits, bias});
    }
    run_case(lt, {.type = type, .n = 768, .k = 512, .epilogue = Epilogue::kLogits, .softcap = 2.0f});
    run_case(lt, {.type = type, .n = 64, .k = 96, .epilogue = Epilogue::kGated, .activation = Activation::kGeluTanh});
  }
  run_case(lt, {WeightType::kBf16, 1003, 512, Epilogue::kLogits, true});
}

TEST(CublasLt, RowsInChunksWhereTheWorkspaceIsSmall) {
  AOTLLM_NEEDS_CUBLASLT(lt);
  const std::size_t room = (std::size_t{1} << 20) + std::size_t{768} * 2 * 300;
  run_case(lt, {.type = WeightType::kBf16, .n = 768, .k = 512, .epilogue = Epilogue::kGated, .workspace_bytes = room});
  run_case(lt, {.type = WeightType::kFp8, .n = 768, .k = 512, .epilogue = Epilogue::kGated, .workspace_bytes = room});
}

TEST(CublasLt, LeavesTheCountersOfOthersZeroAndCanBeCaptured) {
  AOTLLM_NEEDS_CUBLASLT(lt);
  const Case c{WeightType::kFp8, 1024, 2048, Epilogue::kGated, true};
  Linear linear(c);
  const auto gemm = make_cublaslt_gemm(lt, linear.problem(), linear.workspace());
  ASSERT_NE(gemm, nullptr);
  cudaStream_t handle;
  check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "stream");
  gemm->launch(40, {handle, false});
  check(cudaStreamSynchronize(handle), "warm-up");
  linear.reset();
  check(cudaDeviceSynchronize(), "reset");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < 3; ++i) gemm->launch(40, {handle, true});
  check(cudaStreamEndCapture(handle, &graph), "end of capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  check(cudaGraphLaunch(exec, handle), "launch");
  check(cudaStreamSynchronize(handle), "graph");
  compare(c, linear, linear.result(), 40);
  std::vector<std::uint8_t> head(1 << 20);
  check(cudaMemcpy(head.data(), linear.workspace().data, head.size(), cudaMemcpyDeviceToHost), "copy");
  EXPECT_TRUE(std::all_of(head.begin(), head.end(), [](std::uint8_t byte) { return byte == 0; }));
  check(cudaGraphExecDestroy(exec), "destroy");
  check(cudaGraphDestroy(graph), "destroy");
  check(cudaStreamDestroy(handle), "destroy");
}

TEST(CublasLt, NullWithoutALibraryOrForOtherTypes) {
  EXPECT_EQ(make_cublaslt_gemm(nullptr, GemmProblem{}, Workspace{}), nullptr);
  EXPECT_ANY_THROW(open_cublaslt("/nowhere/libcublasLt.so"));
}

}  // namespace
}  // namespace aotllm::cuda
