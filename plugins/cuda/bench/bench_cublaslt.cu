#include <cstdio>
#include <memory>
#include <vector>

#include "bench/random_data.cuh"
#include "bench/timing.h"
#include "device_array.h"
#include "gemm/cublaslt_library.h"
#include "gemm/gemm.h"

// cuBLASLt on the linears of an 8B model, weights rotating over more than the L2. Argument: path of the library.
namespace aotllm::cuda {
namespace {

constexpr int kMaxRows = 2048;
constexpr std::size_t kWeightBytes = std::size_t{128256} * 4096 * 2;
constexpr double kReadLimit = 4265e9;
constexpr double kBf16Limit = 785e12;
constexpr double kFp8Limit = 1449e12;

struct Shape {
  const char* name;
  int n;
  int k;
  Epilogue epilogue;
};

struct Buffers {
  DeviceArray<std::uint8_t> weights{kWeightBytes};
  DeviceArray<std::uint8_t> x{std::size_t{kMaxRows} * 14336 * 2};
  DeviceArray<std::uint8_t> y{std::size_t{kMaxRows} * 128256 * 4};
  DeviceArray<__nv_bfloat16> residual{std::size_t{kMaxRows} * 4096};
  DeviceArray<float> scales{128256};
  DeviceArray<std::uint8_t> workspace{kWorkspaceBytes};

  explicit Buffers(bool fp8) {
    fill_random(residual.data(), residual.size(), 1.0f);
    fill_random(scales.data(), scales.size(), 1e-3f);
    workspace.fill(0);
    if (fp8) {
      fill_random(weights.data(), kWeightBytes, 50.0f);
      fill_random(x.data(), x.size(), 50.0f);
    } else {
      fill_random(reinterpret_cast<__nv_bfloat16*>(weights.data()), kWeightBytes / 2, 0.02f);
      fill_random(reinterpret_cast<__nv_bfloat16*>(x.data()), x.size() / 2, 1.0f);
    }
  }
};

void bench_shape(const std::shared_ptr<CublasLtLibrary>& library, const Buffers& buffers, bool fp8, const Shape& s,
                 int candidate) {
  const std::size_t bytes = static_cast<std::size_t>(s.n) * s.k * (fp8 ? 1 : 2);
  std::vector<std::unique_ptr<Gemm>> gemms;
  for (std::size_t at = 0; at + bytes <= kWeightBytes && at < (std::size_t{200} << 20); at += bytes) {
    GemmProblem p;
    p.w = {fp8 ? WeightType::kFp8 : WeightType::kBf16,
           s.n,
           s.k,
           buffers.weights.data() + at,
           buffers.scales.data(),
           nullptr};
    p.x = buffers.x.data();
    p.x_scales = buffers.scales.data();
    p.max_m = kMaxRows;
    p.epilogue = s.epilogue;
    p.residual = buffers.residual.data();
    p.y = buffers.y.data();
    gemms.push_back(make_cublaslt_gemm(library, p, {buffers.workspace.data(), buffers.workspace.bytes()}, candidate));
    if (gemms.back() == nullptr) {
      if (candidate == 0) std::printf("%-10s %s: no algorithm\n", s.name, fp8 ? "fp8" : "bf16");
      return;
    }
  }
  for (const int m : {1, 64, 256, 2048}) {
    if (candidate > 0 && m == 2048) continue;
    const int calls = m <= 256 ? 12 : 4;
    const auto work = [&](int i, const Stream& stream) { gemms[i % gemms.size()]->launch(m, stream); };
    const double seconds = time_in_graph(calls, work, 9);
    const double flops = 2.0 * m * s.n * s.k / seconds;
    const double read = static_cast<double>(bytes) / seconds;
    std::printf("%-8s %d %5dx%5d %s m %4d %8.1f us %5.0f GB/s (%3.0f %%) %6.0f TFLOP/s (%3.0f %%)\n", s.name, candidate,
                s.n, s.k, fp8 ? "fp8 " : "bf16", m, seconds * 1e6, read * 1e-9, 100 * read / kReadLimit, flops * 1e-12,
                100 * flops / (fp8 ? kFp8Limit : kBf16Limit));
  }
}

void bench_all(const char* path) {
  const std::shared_ptr<CublasLtLibrary> library = open_cublaslt(path);
  if (library == nullptr) {
    std::printf("no cuBLASLt\n");
    return;
  }
  for (const bool fp8 : {false, true}) {
    const Buffers buffers(fp8);
    for (const Shape& shape :
         {Shape{"qkv", 6144, 4096, Epilogue::kStore}, Shape{"out", 4096, 4096, Epilogue::kResidual},
          Shape{"gate_up", 28672, 4096, Epilogue::kGated}, Shape{"gu store", 28672, 4096, Epilogue::kStore},
          Shape{"down", 4096, 14336, Epilogue::kResidual}, Shape{"head", 128256, 4096, Epilogue::kLogits}}) {
      for (int candidate = 0; candidate < 6; ++candidate) bench_shape(library, buffers, fp8, shape, candidate);
    }
  }
}

}  // namespace
}  // namespace aotllm::cuda

int main(int argc, char** argv) {
  aotllm::cuda::bench_all(argc > 1 ? argv[1] : "");
  return 0;
}
