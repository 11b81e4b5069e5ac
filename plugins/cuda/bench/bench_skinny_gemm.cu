// Times of make_skinny_gemm on the linears of Llama-3.1-8B: each alone (weights rotated, programmatic launches in a
// CUDA graph), and as a chain over layers. With --sweep, combinations of plans are compared as layers first.

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/timing.h"
#include "device_array.h"
#include "gemm/skinny_gemm.h"

namespace aotllm::cuda {
namespace {

constexpr double kReadLimit = 4265e9;  // bytes/s
constexpr int kLayers = 8;
constexpr int kMaxRows = 64;

struct Shape {
  const char* name;
  int n, k;
  Epilogue epilogue;
};
constexpr std::array<Shape, 5> kShapes = {{{"qkv", 6144, 4096, Epilogue::kStore},
                                           {"output", 4096, 4096, Epilogue::kResidual},
                                           {"gate+up", 28672, 4096, Epilogue::kGated},
                                           {"down", 4096, 14336, Epilogue::kResidual},
                                           {"head", 128256, 4096, Epilogue::kLogits}}};
constexpr int kLinears = 4;  // of a layer

/// Small normal numbers of either type, no NaN.
__global__ void fill(std::uint32_t* words, std::size_t size, bool bf16) {
  for (std::size_t i = blockIdx.x * 256ul + threadIdx.x; i < size; i += gridDim.x * 256ul) {
    std::uint32_t bits = static_cast<std::uint32_t>(i) * 2654435761u ^ static_cast<std::uint32_t>(i >> 13);
    bits ^= bits >> 15, bits *= 0x2c1b3c6du, bits ^= bits >> 12;
    words[i] = bf16 ? (bits & 0x81ff81ffu) + 0x3c003c00u : bits & 0xbfbfbfbfu;
  }
}

/// Stands for what is between the GEMMs of a layer: a block per row reads and writes it.
__global__ void small_kernel(const float4* from, float4* to, int width) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  for (int i = threadIdx.x; i < width; i += blockDim.x) to[blockIdx.x * width + i] = from[blockIdx.x * width + i];
}

struct Bench {
  WeightType type;
  DeviceArray<std::uint8_t> weights{std::size_t{3600} << 20};
  DeviceArray<std::uint8_t> scratch{kWorkspaceBytes};
  DeviceArray<std::uint8_t> x{std::size_t{kMaxRows} * 14336 * 2};
  DeviceArray<std::uint8_t> y{std::size_t{kMaxRows} * 128256 * 4};
  DeviceArray<std::uint8_t> other{std::size_t{kMaxRows} * 4096 * 2};
  DeviceArray<float> scales{std::size_t{1} << 20};

  explicit Bench(WeightType type) : type(type) {
    const bool bf16 = type == WeightType::kBf16;
    fill<<<2048, 256>>>(reinterpret_cast<std::uint32_t*>(weights.data()), weights.size() / 4, bf16);
    fill<<<256, 256>>>(reinterpret_cast<std::uint32_t*>(x.data()), x.size() / 4, bf16);
    fill<<<256, 256>>>(reinterpret_cast<std::uint32_t*>(other.data()), other.size() / 4, true);
    scratch.fill(0);
    scales.upload(std::vector<float>(scales.size(), 0.01f));
    check(cudaDeviceSynchronize(), "fill");
  }

  std::size_t bytes(const Shape& shape) const {
    return static_cast<std::size_t>(shape.n) * shape.k * (type == WeightType::kBf16 ? 2 : 1);
  }

  std::unique_ptr<Gemm> make(const Shape& shape, std::size_t offset, int rows_tile, const SkinnyPlan* plan) const {
    GemmProblem problem;
    problem.w = {type, shape.n, shape.k, weights.data() + offset, scales.data(), nullptr};
    problem.x = x.data();
    problem.x_scales = scales.data();
    problem.max_m = kMaxRows;
    problem.epilogue = shape.epilogue;
    problem.residual = reinterpret_cast<const __nv_bfloat16*>(other.data());
    problem.y = y.data();
    const Workspace workspace{scratch.data(), scratch.bytes()};
    return plan != nullptr ? make_skinny_gemm(problem, rows_tile, workspace, *plan)
                           : make_skinny_gemm(problem, rows_tile, workspace);
  }

  /// Seconds of one launch.
  double time_linear(const Shape& shape, int m, int rows_tile, const SkinnyPlan* plan, int replays = 9) const {
    const std::size_t size = bytes(shape);
    const int copies = static_cast<int>(std::clamp<std::size_t>((std::size_t{400} << 20) / size + 1, 2, 24));
    std::vector<std::unique_ptr<Gemm>> gemms;
    for (int i = 0; i < copies; ++i) {
      const std::size_t fits = weights.bytes() / size;
      gemms.push_back(make(shape, (static_cast<std::size_t>(i) % fits) * size, rows_tile, plan));
      if (gemms.back() == nullptr) return 1.0;
    }
    return time_in_graph(
        copies, [&](int i, const Stream& stream) { gemms[static_cast<std::size_t>(i)]->launch(m, stream); }, replays);
  }

  /// Seconds of a layer: QKV → output → gate+up → down; `small` puts one to two small kernels before each but down.
  double time_chain(int m, int rows_tile, const std::array<const SkinnyPlan*, kLinears>& plans, bool small,
                    int replays = 9) const {
    std::vector<std::unique_ptr<Gemm>> gemms;
    std::size_t offset = 0;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int i = 0; i < kLinears; ++i) {
        gemms.push_back(make(kShapes[i], offset, rows_tile, plans[i]));
        offset += bytes(kShapes[i]);
      }
    }
    const auto between = [&](const Stream& stream) {
      launch(small_kernel, dim3(m), dim3(256), 0, stream, reinterpret_cast<const float4*>(other.data()),
             reinterpret_cast<float4*>(y.data() + (std::size_t{16} << 20)), 4096 * 2 / 16);
    };
    const auto layer = [&](int index, const Stream& stream) {
      for (int i = 0; i < kLinears; ++i) {
        for (int j = 0; small && j < (i == 1 ? 2 : i == 3 ? 0 : 1); ++j) between(stream);
        gemms[static_cast<std::size_t>(index * kLinears + i)]->launch(m, stream);
      }
    };
    return time_in_graph(kLayers, layer, replays);
  }
};

std::string describe(const SkinnyPlan& plan) {
  char text[64];
  std::snprintf(text, sizeof text, "%dx%d s%d g%d c%d e%d p%d", plan.rows, plan.sub, plan.stages, plan.grid,
                plan.cluster, plan.early, plan.prefetch);
  return text;
}

/// Plans worth trying for each linear of a layer.
std::array<std::vector<SkinnyPlan>, kLinears> candidates(int rows_tile, int early) {
  const auto plan = [&](int rows, int sub, int stages, int grid, int cluster) {
    return SkinnyPlan{rows, sub, stages, grid, grid == 112 || grid == 96, cluster, early * (rows * sub == 256 ? 1 : 2)};
  };
  if (rows_tile == 64) {
    return {{{plan(128, 1, 4, 0, 2), plan(128, 1, 8, 0, 2), plan(128, 1, 4, 0, 4)},
             {plan(128, 1, 8, 0, 2), plan(128, 1, 8, 0, 4), plan(128, 1, 4, 0, 4)},
             {plan(128, 1, 4, 112, 1), plan(128, 1, 8, 112, 1), plan(128, 1, 8, 132, 1), plan(128, 1, 8, 128, 1)},
             {plan(128, 1, 8, 0, 2), plan(128, 1, 8, 0, 4)}}};
  }
  const int s = rows_tile == 8 ? 6 : rows_tile == 16 ? 5 : 4;
  const int large = rows_tile == 8 ? 12 : rows_tile == 16 ? 10 : 9;
  std::array<std::vector<SkinnyPlan>, kLinears> plans = {
      {{plan(64, 2, s, 0, 2), plan(64, 2, large, 96, 1), plan(64, 2, s, 96, 1)},
       {plan(64, 2, s, 0, 2), plan(64, 2, large, 0, 2)},
       {plan(128, 1, s, 112, 1), plan(128, 1, large, 112, 1), plan(64, 2, large, 128, 1), plan(64, 2, s, 0, 2)},
       {plan(64, 2, large, 0, 2)}}};
  if (rows_tile == 8) {
    plans[1].push_back(plan(64, 4, 6, 0, 2));
    plans[2].push_back(plan(64, 4, 6, 128, 1));
    plans[2].push_back(plan(64, 4, 3, 0, 2));
    plans[3][0] = plan(64, 4, 6, 0, 2);
  }
  return plans;
}

/// Prints the best layers of all combinations of plans; returns the best.
std::array<SkinnyPlan, kLinears> sweep(const Bench& bench, int rows_tile) {
  struct Layer {
    double alone, small;
    std::array<SkinnyPlan, kLinears> plans;
  };
  std::vector<Layer> layers;
  for (const int early : {1, 3, 1 << 20}) {
    const auto plans = candidates(rows_tile, early);
    for (const auto& qkv : plans[0]) {
      for (const auto& output : plans[1]) {
        for (const auto& gate_up : plans[2]) {
          for (const auto& down : plans[3]) {
            const std::array<const SkinnyPlan*, kLinears> chosen = {&qkv, &output, &gate_up, &down};
            const int m = rows_tile == 8 ? 1 : rows_tile;
            layers.push_back({bench.time_chain(m, rows_tile, chosen, false, 5),
                              bench.time_chain(m, rows_tile, chosen, true, 5),
                              {qkv, output, gate_up, down}});
          }
        }
      }
    }
  }
  std::sort(layers.begin(), layers.end(),
            [](const Layer& a, const Layer& b) { return a.alone + 2 * a.small < b.alone + 2 * b.small; });
  for (std::size_t i = 0; i < 9; ++i) {
    const Layer& layer = layers[i < 8 ? i : layers.size() - 1];
    std::printf("  layer %.1f, with small kernels %.1f:", layer.alone * 1e6, layer.small * 1e6);
    for (const SkinnyPlan& plan : layer.plans) std::printf(" (%s)", describe(plan).c_str());
    std::printf("\n");
  }
  return layers.front().plans;
}

void table(const Bench& bench, const char* type, bool with_sweep) {
  for (const auto& [m, rows_tile] : {std::pair(1, 8), {8, 8}, {16, 16}, {32, 32}, {64, 64}}) {
    std::array<SkinnyPlan, kLinears> best;
    const bool sweeps = with_sweep && m != 8;
    if (sweeps) {
      std::printf("%s, up to %d rows\n", type, rows_tile);
      best = sweep(bench, rows_tile);
    }
    std::array<const SkinnyPlan*, kLinears> plans{};
    if (sweeps) {
      for (int i = 0; i < kLinears; ++i) plans[i] = &best[i];
      std::printf("  best of each: layer %.1f, with small kernels %.1f µs\n",
                  bench.time_chain(m, rows_tile, plans, false) * 1e6,
                  bench.time_chain(m, rows_tile, plans, true) * 1e6);
      plans = {};
    }
    std::printf("%-4s m=%-2d", type, m);
    std::size_t layer_bytes = 0;
    for (const Shape& shape : kShapes) {
      const double seconds = bench.time_linear(shape, m, rows_tile, nullptr);
      if (shape.epilogue != Epilogue::kLogits) layer_bytes += bench.bytes(shape);
      const double rate = static_cast<double>(bench.bytes(shape)) / seconds;
      std::printf(" | %s %.2f µs %.0f GB/s %.0f %%", shape.name, seconds * 1e6, rate * 1e-9, 100.0 * rate / kReadLimit);
    }
    const double limit = static_cast<double>(layer_bytes) / kReadLimit;
    const double chain = bench.time_chain(m, rows_tile, plans, false);
    const double small = bench.time_chain(m, rows_tile, plans, true);
    std::printf(" | layer %.1f µs (limit %.1f, %.0f %%), with small kernels %.1f\n", chain * 1e6, limit * 1e6,
                100.0 * limit / chain, small * 1e6);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace aotllm::cuda

int main(int argc, char** argv) {
  using namespace aotllm::cuda;
  const bool with_sweep = argc > 1 && std::strcmp(argv[1], "--sweep") == 0;
  for (const auto& [type, name] :
       {std::pair(WeightType::kBf16, "bf16"), {WeightType::kFp8, "fp8"}, {WeightType::kFp8Block, "fp8b"}}) {
    table(Bench(type), name, with_sweep && type != WeightType::kFp8Block);
  }
}
