// The linears of an 8B model in place: norms, GEMMs and quantization of some layers in one graph with programmatic
// launches, attention left out. bench_layer_gemms (bf16|fp8) ROWS QKV O GATE_UP DOWN [vary=A,B,...] [LIBRARY]
// Kernels are named as in tables of tactics (tile.3, cublaslt.1); `vary` puts each of the given ones (a number is a
// tile; none = all tiles) in the place of each linear's and prints what that adds to a layer, measured in turn.

#include <cuda_bf16.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "bench/random_data.cuh"
#include "bench/timing.h"
#include "device_array.h"
#include "elementwise/elementwise.h"
#include "gemm/cublaslt_library.h"
#include "gemm/gemm.h"

namespace aotllm::cuda {
namespace {

constexpr int kLayers = 8;
constexpr int kWidth = 4096;
constexpr int kInner = 14336;
constexpr int kQkv = 6144;
struct Linear {
  const char* name;
  int n;
  int k;
  Epilogue epilogue;
};
constexpr Linear kLinears[4] = {{"qkv", kQkv, kWidth, Epilogue::kStore},
                                {"o", kWidth, kWidth, Epilogue::kResidual},
                                {"gate_up", 2 * kInner, kWidth, Epilogue::kGated},
                                {"down", kWidth, kInner, Epilogue::kResidual}};

class Bench {
 public:
  Bench(bool fp8, int m, std::shared_ptr<CublasLtLibrary> library)
      : fp8_(fp8), m_(m), max_m_((m + 127) / 128 * 128), library_(std::move(library)) {
    const std::size_t rows = max_m_;
    stream_ = random<__nv_bfloat16>(rows * kWidth, 1.0f);
    qkv_ = DeviceArray<__nv_bfloat16>(rows * kQkv);
    normed_ = DeviceArray<std::uint8_t>(rows * kWidth * 2);
    inner_ = DeviceArray<__nv_bfloat16>(rows * kInner);
    codes_ = DeviceArray<std::uint8_t>(rows * kInner);
    x_scales_ = DeviceArray<float>(rows);
    ones_ = DeviceArray<float>(std::vector<float>(kWidth, 1.0f));
    scratch_ = DeviceArray<std::uint8_t>(kWorkspaceBytes);
    scratch_.fill(0);
    for (int i = 0; i < 4 * kLayers; ++i) {
      const Linear& linear = kLinears[i % 4];
      const std::size_t size = static_cast<std::size_t>(linear.n) * linear.k;
      weights_.push_back(fp8 ? random<std::uint8_t>(size, 1.0f) : DeviceArray<std::uint8_t>(2 * size));
      if (!fp8) fill_random(reinterpret_cast<__nv_bfloat16*>(weights_.back().data()), size, 0.02f);
    }
    w_scales_ = DeviceArray<float>(std::vector<float>(2 * kInner, 0.02f));
  }

  /// Seconds of a layer; 0 where a kernel does not take its linear.
  double measure(const std::vector<std::string>& kernels) {
    std::vector<std::unique_ptr<Gemm>> gemms;
    for (int i = 0; i < 4 * kLayers; ++i) {
      gemms.push_back(make(kernels[i % 4], i));
      if (gemms.back() == nullptr) return 0.0;
    }
    return time_in_graph(
        kLayers, [&](int layer, const Stream& stream) { run_layer(&gemms[4 * layer], stream); }, m_ > 512 ? 5 : 11);
  }

 private:
  template <class T>
  static DeviceArray<T> random(std::size_t size, float sigma) {
    DeviceArray<T> values(size);
    fill_random(values.data(), size, sigma);
    return values;
  }

  std::unique_ptr<Gemm> make(const std::string& kernel, int index) {
    const Linear& linear = kLinears[index % 4];
    GemmProblem p;
    p.w = {fp8_ ? WeightType::kFp8 : WeightType::kBf16,
           linear.n,
           linear.k,
           weights_[index].data(),
           w_scales_.data(),
           nullptr};
    const void* inputs[4] = {normed_.data(), qkv_.data(), normed_.data(), inner_.data()};
    void* outputs[4] = {qkv_.data(), stream_.data(), inner_.data(), stream_.data()};
    p.x = fp8_ ? codes_.data() : inputs[index % 4];
    p.x_scales = x_scales_.data();
    p.max_m = max_m_;
    p.epilogue = linear.epilogue;
    p.residual = stream_.data();
    p.y = outputs[index % 4];
    const Workspace workspace{scratch_.data(), scratch_.bytes()};
    const int number = std::atoi(kernel.c_str() + std::min(kernel.find('.') + 1, kernel.size()));
    if (kernel.starts_with("tile")) return make_tile_gemm(p, number, workspace);
    return make_cublaslt_gemm(library_, p, workspace, kernel.find('.') == std::string::npos ? 0 : number);
  }

  void norm(const __nv_bfloat16* x, int width, bool scale, const Stream& stream) {
    RmsNormArgs args;
    args.x = x;
    args.weight = scale ? ones_.data() : nullptr;
    args.eps = 1e-5f;
    args.m = m_;
    args.width = width;
    if (fp8_) {
      args.y_fp8 = codes_.data();
      args.y_scales = x_scales_.data();
    } else {
      args.y = reinterpret_cast<__nv_bfloat16*>(normed_.data());
    }
    rms_norm(args, stream);
  }

  void run_layer(const std::unique_ptr<Gemm>* gemms, const Stream& stream) {
    norm(stream_.data(), kWidth, true, stream);
    gemms[0]->launch(m_, stream);
    if (fp8_) norm(qkv_.data(), kWidth, false, stream);
    gemms[1]->launch(m_, stream);
    norm(stream_.data(), kWidth, true, stream);
    gemms[2]->launch(m_, stream);
    if (fp8_) norm(inner_.data(), kInner, false, stream);
    gemms[3]->launch(m_, stream);
  }

  bool fp8_;
  int m_;
  int max_m_;
  std::shared_ptr<CublasLtLibrary> library_;
  DeviceArray<__nv_bfloat16> stream_, qkv_, inner_;
  DeviceArray<std::uint8_t> normed_, codes_, scratch_;
  DeviceArray<float> x_scales_, ones_, w_scales_;
  std::vector<DeviceArray<std::uint8_t>> weights_;
};

int run(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr, "usage: bench_layer_gemms (bf16|fp8) ROWS QKV O GATE_UP DOWN [vary=A,B,...] [LIBRARY]\n");
    return 2;
  }
  std::vector<std::string> others;
  std::string path;
  for (int i = 7; i < argc; ++i) {
    if (std::strncmp(argv[i], "vary=", 5) != 0) {
      path = argv[i];
      continue;
    }
    std::stringstream list(argv[i] + 5);
    for (std::string name; std::getline(list, name, ',');) others.push_back(name);
    for (int tile = 0; others.empty() && tile < num_gemm_tiles(); ++tile) others.push_back(std::to_string(tile));
  }
  const std::vector<std::string> kernels(argv + 3, argv + 7);
  Bench bench(std::strcmp(argv[1], "fp8") == 0, std::atoi(argv[2]), open_cublaslt(path));
  for (int i = 0; i < 10; ++i) bench.measure(kernels);  // the clock settles
  std::vector<double> all;
  for (int i = 0; i < 9; ++i) all.push_back(bench.measure(kernels) * 1e6);
  std::sort(all.begin(), all.end());
  std::printf("%s %s rows, %s %s %s %s: %.1f us a layer (%.1f ... %.1f)\n", argv[1], argv[2], kernels[0].c_str(),
              kernels[1].c_str(), kernels[2].c_str(), kernels[3].c_str(), all[all.size() / 2], all.front(), all.back());
  for (int linear = 0; !others.empty() && linear < 4; ++linear) {
    std::printf("  %-7s", kLinears[linear].name);
    for (const std::string& other : others) {
      std::vector<std::string> varied = kernels;
      varied[linear] = std::isdigit(static_cast<unsigned char>(other[0])) ? "tile." + other : other;
      std::vector<double> added;
      for (int i = 0; i < 3; ++i) {
        const double base = bench.measure(kernels);
        const double seconds = bench.measure(varied);
        if (seconds > 0) added.push_back((2 * seconds - base - bench.measure(kernels)) * 0.5e6);
      }
      if (added.empty()) continue;
      std::sort(added.begin(), added.end());
      std::printf(" %s:%+.1f", other.c_str(), added[added.size() / 2]);
      std::fflush(stdout);
    }
    std::printf("\n");
  }
  return 0;
}

}  // namespace
}  // namespace aotllm::cuda

int main(int argc, char** argv) {
  try {
    return aotllm::cuda::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
