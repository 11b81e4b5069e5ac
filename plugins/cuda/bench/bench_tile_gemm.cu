// Tile GEMMs of an 8B model beside the library's figures: bench_tile_gemm [sm80] [bf16|fp8|block] [rows ...]

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/timing.h"
#include "device_array.h"
#include "gemm/gemm.h"

namespace aotllm::cuda {
namespace {

struct Linear {
  const char* name;
  int n;
  int k;
  Epilogue epilogue;
};
constexpr Linear kLinears[] = {
    {"qkv", 6144, 4096, Epilogue::kStore},      {"o", 4096, 4096, Epilogue::kResidual},
    {"gate_up", 28672, 4096, Epilogue::kGated}, {"down", 4096, 14336, Epilogue::kResidual},
    {"head", 128256, 4096, Epilogue::kLogits},
};

/// The library's µs without an epilogue; 0 = not measured.
double library(int linear, WeightType type, int m) {
  constexpr double kBf16[][2] = {{22.8, 129}, {17.4, 86}, {88.4, 689}, {47.8, 323}, {415, 3130}};
  constexpr double kFp8[][2] = {{15.0, 77.8}, {14.4, 54.9}, {55.9, 401}, {38.1, 181}, {231, 1833}};
  const int at = m == 256 ? 0 : m == 2048 ? 1 : -1;
  if (at < 0 || type == WeightType::kFp8Block) return 0.0;
  return (type == WeightType::kBf16 ? kBf16 : kFp8)[linear][at];
}

__device__ float noise(std::size_t i) {
  std::uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  float sum = 0.0f;  // of four uniform numbers: nearly normal
  for (int j = 0; j < 4; ++j) sum += static_cast<float>(z >> (16 * j) & 0xFFFF) * (1.0f / 65536.0f);
  return (sum - 2.0f) * 1.7f;
}
__global__ void fill_bf16(__nv_bfloat16* to, std::size_t size) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += stride) to[i] = __float2bfloat16(noise(i));
}
__global__ void fill_fp8(std::uint8_t* to, std::size_t size) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += stride) {
    to[i] = __nv_cvt_float_to_fp8(noise(i), __NV_SATFINITE, __NV_E4M3);
  }
}
__global__ void fill_scales(float* to, std::size_t size) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
    to[i] = 0.01f + 0.001f * noise(i);
  }
}

DeviceArray<std::uint8_t> values(WeightType type, std::size_t size) {
  DeviceArray<std::uint8_t> out(type == WeightType::kBf16 ? 2 * size : size);
  if (type == WeightType::kBf16) {
    fill_bf16<<<528, 512>>>(reinterpret_cast<__nv_bfloat16*>(out.data()), size);
  } else {
    fill_fp8<<<528, 512>>>(out.data(), size);
  }
  return out;
}
DeviceArray<float> scales(std::size_t size) {
  DeviceArray<float> out(size);
  fill_scales<<<132, 512>>>(out.data(), size);
  return out;
}

void measure(int index, WeightType type, const std::vector<int>& all_rows, int sm) {
  const Linear& linear = kLinears[index];
  const std::size_t n = linear.n, k = linear.k;
  const int max_m = linear.epilogue == Epilogue::kLogits ? 2048 : 8192;
  const std::size_t weight_bytes = n * k * (type == WeightType::kBf16 ? 2 : 1);
  const int copies = static_cast<int>(std::clamp<std::size_t>((std::size_t{240} << 20) / weight_bytes, 2, 8));
  const auto w = values(type, copies * n * k);  // copies stand one behind the other
  const auto x = values(type, max_m * k);
  const auto residual = values(WeightType::kBf16, max_m * n);
  const auto w_scales = scales(std::max(n, (n / 128 + 1) * (k / 128)));
  const auto x_scales = scales(max_m * (k / 128));
  DeviceArray<float> y(max_m * n / (linear.epilogue == Epilogue::kLogits ? 1 : 2));
  DeviceArray<std::uint8_t> scratch(kWorkspaceBytes);
  scratch.fill(0);
  const Workspace workspace{scratch.data(), scratch.size()};
  check(cudaDeviceSynchronize(), "fill");
  for (int m : all_rows) {
    if (m > max_m) continue;
    const double flop = 2.0 * m * n * k;
    double best = 1e9;
    int best_tile = -1;
    std::string line;
    for (int tile = 0; tile < (sm < 90 ? num_sm80_shapes() : num_gemm_tiles()); ++tile) {
      std::vector<std::unique_ptr<Gemm>> gemms;
      for (int i = 0; i < copies; ++i) {
        GemmProblem p;
        p.w = {type, linear.n, linear.k, w.data() + i * weight_bytes, w_scales.data(), nullptr};
        p.x = x.data();
        p.x_scales = x_scales.data();
        p.max_m = max_m;
        p.epilogue = linear.epilogue;
        p.residual = reinterpret_cast<const __nv_bfloat16*>(residual.data());
        p.y = y.data();
        gemms.push_back(sm < 90 ? make_sm80_gemm(p, tile, workspace) : make_tile_gemm(p, tile, workspace));
      }
      if (gemms[0] == nullptr) continue;
      const int calls = flop > 4e11 ? copies : 2 * copies;
      const double seconds = time_in_graph(
          calls, [&](int i, const Stream& stream) { gemms[i % copies]->launch(m, stream); }, flop > 4e11 ? 3 : 7, true,
          sm);
      if (seconds < best) {
        best = seconds;
        best_tile = tile;
      }
      char text[32];
      std::snprintf(text, sizeof text, " %d:%.1f", tile, seconds * 1e6);
      line += text;
    }
    if (best_tile < 0) continue;
    const double limit = type == WeightType::kBf16 ? 785e12 : 1449e12;
    std::printf("%-7s m %4d best %d %7.1f us %5.0f TF/s %3.0f%% %5.0f GB/s %3.0f%% lib %6.1f |%s\n", linear.name, m,
                best_tile, best * 1e6, flop / best * 1e-12, 100 * flop / best / limit, weight_bytes / best * 1e-9,
                100 * weight_bytes / best / 4265e9, library(index, type, m), line.c_str());
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace aotllm::cuda

int main(int argc, char** argv) {
  using namespace aotllm::cuda;
  std::vector<int> rows;
  std::vector<WeightType> types;
  int sm = 90;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "sm80") == 0) {
      sm = 80;
    } else if (std::strcmp(argv[i], "bf16") == 0) {
      types.push_back(WeightType::kBf16);
    } else if (std::strcmp(argv[i], "fp8") == 0) {
      types.push_back(WeightType::kFp8);
    } else if (std::strcmp(argv[i], "block") == 0) {
      types.push_back(WeightType::kFp8Block);
    } else {
      rows.push_back(std::atoi(argv[i]));
    }
  }
  if (rows.empty()) rows = {128, 256, 512, 2048, 8192};
  if (types.empty()) types = {WeightType::kBf16, WeightType::kFp8, WeightType::kFp8Block};
  for (WeightType type : types) {
    std::printf("%s (us per tile after the bar)\n", type == WeightType::kBf16  ? "bf16"
                                                    : type == WeightType::kFp8 ? "fp8"
                                                                               : "fp8_block");
    for (int i = 0; i < 5; ++i) measure(i, type, rows, sm);
  }
}
