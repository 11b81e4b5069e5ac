// Times of make_int_gemm on the linears of Llama-3.1-8B (weights rotated, programmatic launches in a CUDA graph), and
// of dequantized GEMMs: bench_int_gemm [--sweep [seconds]]. With --sweep, plans are compared for each of them.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/random_data.cuh"
#include "bench/timing.h"
#include "device_array.h"
#include "gemm/dequantize.h"
#include "gemm/int_gemm.h"

namespace aotllm::cuda {
namespace {

constexpr double kReadLimit = 4265e9;  // bytes/s
constexpr int kMaxRows = 2048;

struct Linear {
  const char* name;
  int n, k;
  Epilogue epilogue;
};
constexpr std::array<Linear, 4> kLinears = {{{"qkv", 6144, 4096, Epilogue::kStore},
                                             {"output", 4096, 4096, Epilogue::kResidual},
                                             {"gate_up", 28672, 4096, Epilogue::kGated},
                                             {"down", 4096, 14336, Epilogue::kResidual}}};

__global__ void fill_codes(std::uint32_t* words, std::size_t size) {
  for (std::size_t i = blockIdx.x * 256ul + threadIdx.x; i < size; i += gridDim.x * 256ul) {
    std::uint32_t bits = static_cast<std::uint32_t>(i) * 2654435761u ^ static_cast<std::uint32_t>(i >> 13);
    bits ^= bits >> 15, bits *= 0x2c1b3c6du, bits ^= bits >> 12, bits *= 0x297a2d39u;
    words[i] = bits ^ bits >> 15;
  }
}

struct Bench {
  WeightType type;
  int group;
  DeviceArray<std::uint8_t> codes{std::size_t{800} << 20};
  DeviceArray<float> scales{std::size_t{50} << 20};
  DeviceArray<std::uint8_t> zeros{std::size_t{50} << 20};
  DeviceArray<std::uint8_t> scratch{dequant_workspace_bytes(28672, 4096)};
  DeviceArray<__nv_bfloat16> x{std::size_t{kMaxRows} * 14336};
  DeviceArray<__nv_bfloat16> residual{std::size_t{kMaxRows} * 4096};
  DeviceArray<std::uint8_t> y{std::size_t{kMaxRows} * 28672 * 2};

  Bench(WeightType type, int group) : type(type), group(group) {
    fill_codes<<<2048, 256>>>(reinterpret_cast<std::uint32_t*>(codes.data()), codes.size() / 4);
    fill_random(x.data(), x.size(), 1.0f);
    fill_random(residual.data(), residual.size(), 1.0f);
    fill_random(scales.data(), scales.size(), 0.01f);
    zeros.fill(7);
    scratch.fill(0);
    check(cudaDeviceSynchronize(), "fill");
  }

  std::size_t code_bytes(const Linear& l) const {
    return static_cast<std::size_t>(l.n) * l.k / (type == WeightType::kInt4 ? 2 : 1);
  }
  std::size_t groups(const Linear& l) const { return group == 0 ? l.n : static_cast<std::size_t>(l.n) * (l.k / group); }
  std::size_t bytes(const Linear& l) const { return code_bytes(l) + groups(l) * (group == 0 ? 4 : 5); }

  GemmProblem problem(const Linear& l, int copy, int max_m) const {
    const std::size_t fits = codes.bytes() / code_bytes(l);
    const std::size_t index = static_cast<std::size_t>(copy) % fits;
    GemmProblem p;
    p.w = {type,
           l.n,
           l.k,
           codes.data() + index * code_bytes(l),
           scales.data() + index * groups(l),
           group == 0 ? nullptr : zeros.data() + index * groups(l),
           group};
    p.x = x.data();
    p.max_m = max_m;
    p.epilogue = l.epilogue;
    p.residual = residual.data();
    p.y = y.data();
    return p;
  }

  template <class Make>
  double time(const Linear& l, int m, int max_m, const Make& make, int replays) const {
    const int copies = static_cast<int>(std::clamp<std::size_t>((std::size_t{300} << 20) / code_bytes(l) + 1, 2, 24));
    std::vector<std::unique_ptr<Gemm>> gemms;
    for (int i = 0; i < copies; ++i) {
      gemms.push_back(make(problem(l, i, max_m), Workspace{scratch.data(), scratch.bytes()}));
      if (gemms.back() == nullptr) return 1.0;
    }
    return time_in_graph(
        copies, [&](int i, const Stream& stream) { gemms[static_cast<std::size_t>(i)]->launch(m, stream); }, replays);
  }
};

int stage_bytes(const Bench& bench, int rows_tile, int rows, int sub) {
  return (bench.type == WeightType::kInt4 ? int_kernel_int4_group128 : int_kernel_int8_row)(rows_tile, rows, sub)
      .stage_bytes;
}

std::vector<IntPlan> candidates(const Bench& bench, const Linear& l, int rows_tile) {
  std::vector<IntPlan> plans;
  for (const auto& [rows, sub] : {std::pair(64, 2), {128, 1}, {128, 2}, {64, 4}}) {
    const int stage = stage_bytes(bench, rows_tile, rows, sub);
    if (stage == 0) continue;  // there is no such kernel
    const int tiles = l.n / rows;
    for (const int resident : {1, 2, 3, 4}) {  // CTAs of a multiprocessor: those of the successor included
      const int ring = (resident == 1 ? 215 : 225 / resident - 2) * 1024;
      IntPlan plan{rows, sub, std::min(kIntMaxStages, ring / stage)};
      if (plan.stages < 2) continue;
      for (const int early : {65536 / stage, 1 << 20}) {
        plan.early = early;
        for (int ctas = std::max(1, resident - 1); ctas <= resident; ++ctas) {
          if (ctas < resident && early == 1 << 20) continue;
          plan.grid = 132 * ctas;
          plans.push_back(plan);
        }
        if (tiles >= 100) {
          plan.whole = true;
          plan.grid = tiles <= 400 ? tiles : (tiles + 1) / 2;
          plans.push_back(plan);
          if (tiles > 400) plan.grid = tiles, plans.push_back(plan);
          plan.whole = false;
        }
        for (const int cluster : {2, 4, 8}) {
          if (tiles * cluster > 528) continue;
          plan.cluster = cluster;
          plans.push_back(plan);
        }
        plan.cluster = 1;
      }
    }
  }
  return plans;
}

std::string describe(const IntPlan& p) {
  char text[64];
  std::snprintf(text, sizeof text, "%dx%d s%d g%d%s c%d e%d", p.rows, p.sub, p.stages, p.grid, p.whole ? "w" : "",
                p.cluster, p.early);
  return text;
}

void sweep(const Bench& bench, const Linear& l, int m, int rows_tile) {
  std::vector<std::pair<double, IntPlan>> timed;
  for (const IntPlan& plan : candidates(bench, l, rows_tile)) {
    const auto make = [&](const GemmProblem& p, Workspace w) { return make_int_gemm(p, rows_tile, w, plan); };
    timed.emplace_back(bench.time(l, m, 64, make, 5), plan);
  }
  std::sort(timed.begin(), timed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (std::size_t i = 0; i < std::min<std::size_t>(6, timed.size()); ++i) {
    std::printf("    %.2f (%s)", timed[i].first * 1e6, describe(timed[i].second).c_str());
  }
  std::printf("\n");
}

void table(const Bench& bench, const char* name, double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& [m, rows_tile] : {std::pair(1, 8), {16, 16}, {8, 8}, {64, 64}, {32, 32}}) {
    for (const Linear& l : kLinears) {
      const auto make = [&](const GemmProblem& p, Workspace w) { return make_int_gemm(p, rows_tile, w); };
      const double time = bench.time(l, m, 64, make, 9);
      const double rate = static_cast<double>(bench.bytes(l)) / time;
      std::printf("%s m=%-2d %-8s %7.2f µs %5.0f GB/s %3.0f %%\n", name, m, l.name, time * 1e6, rate * 1e-9,
                  100.0 * rate / kReadLimit);
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
      if (spent.count() < seconds && m != 8) sweep(bench, l, m, rows_tile);
      std::fflush(stdout);
    }
  }
  for (const int m : {256, 2048}) {
    for (const Linear& l : kLinears) {
      const auto inner = [](const GemmProblem& p, Workspace w) { return make_tile_gemm(p, 0, w); };
      const auto make = [&](const GemmProblem& p, Workspace w) { return make_dequant_gemm(p, w, inner); };
      std::printf("%s m=%-4d %-8s %7.2f µs (dequantized, tile.0)\n", name, m, l.name,
                  bench.time(l, m, kMaxRows, make, 3) * 1e6);
    }
  }
  for (const Linear& l : kLinears) {
    auto* out = reinterpret_cast<__nv_bfloat16*>(bench.scratch.data());
    const double time =
        time_in_graph(4, [&](int i, const Stream& stream) { dequantize(bench.problem(l, i, 64).w, out, stream); }, 5);
    std::printf("%s dequantize %-8s %7.2f µs\n", name, l.name, time * 1e6);
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace aotllm::cuda

int main(int argc, char** argv) {
  using namespace aotllm::cuda;
  const bool with_sweep = argc > 1 && std::strcmp(argv[1], "--sweep") == 0;
  const double seconds = !with_sweep ? 0.0 : argc > 2 ? std::atof(argv[2]) : 1e9;
  table(Bench(WeightType::kInt4, 128), "int4", seconds);
  table(Bench(WeightType::kInt8, 0), "int8", seconds / 2);
}
