// Mixture of experts at the shapes of Mixtral 8x7B and Qwen3-30B-A3B: µs of each kernel and of the whole, GB/s of the
// weights of the experts that are used, TFLOP/s. Rows are rotated, so that experts change from call to call.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "device_array.h"
#include "elementwise/elementwise.h"
#include "moe/moe.h"
#include "random_data.cuh"
#include "timing.h"

namespace aotllm::cuda {
namespace {

using Bf16 = __nv_bfloat16;

struct Model {
  const char* name;
  int num_experts, top_k, hidden, intermediate;
  bool normalize;
};
constexpr Model kModels[] = {{"qwen3", 128, 8, 2048, 768, true}, {"mixtral", 8, 2, 4096, 14336, true}};
constexpr int kSets = 8;  // of rows
constexpr int kMaxRows = 4096;

struct Format {
  const char* name;
  WeightType type;
  int group;  // of integers, in columns; 0 = rows
};
constexpr Format kFormats[] = {{"bf16", WeightType::kBf16, 0},
                               {"fp8", WeightType::kFp8, 0},
                               {"int4", WeightType::kInt4, 128},
                               {"int4g32", WeightType::kInt4, 32},
                               {"int8", WeightType::kInt8, 0}};

/// Of a tile that there is a kernel for.
int most_tokens(WeightType type) {
  return type == WeightType::kBf16 ? 384 : type == WeightType::kFp8 ? 160 : kMoeMostIntTokens;
}

struct Bench {
  Model model;
  const char* name;
  WeightType type;
  int group;
  bool fp8;
  DeviceArray<float> router;
  DeviceArray<std::uint8_t> gate_up, down;
  DeviceArray<float> gate_up_scales, down_scales;
  DeviceArray<std::uint8_t> zeros;
  DeviceArray<Bf16> x, h, y, out;
  DeviceArray<std::uint8_t> codes, h_codes;
  DeviceArray<float> code_scales, h_scales, weights, row_scales, logits;
  DeviceArray<std::int32_t> experts, places, rows, counters;
  DeviceArray<MoeTile> tiles;
  DeviceArray<std::uint32_t> members;
  MoeRouting routing;

  Bench(const Model& m, const Format& format)
      : model(m), name(format.name), type(format.type), group(format.group), fp8(format.type == WeightType::kFp8) {
    const auto e = static_cast<std::size_t>(m.num_experts);
    const auto width = static_cast<std::size_t>(m.hidden);
    const auto inner = static_cast<std::size_t>(m.intermediate);
    const auto pairs = static_cast<std::size_t>(kMaxRows) * m.top_k;
    router = DeviceArray<float>(e * width);
    fill_random(router.data(), router.size(), 0.02f);
    fill_weights(gate_up, gate_up_scales, e * 2 * inner, width);
    fill_weights(down, down_scales, e * width, inner);
    if (group > 0) zeros = DeviceArray<std::uint8_t>(e * 2 * inner * width / group), zeros.fill(7);
    x = DeviceArray<Bf16>(kSets * kMaxRows * width);
    fill_random(x.data(), x.size(), 1.0f);
    if (fp8) {
      codes = DeviceArray<std::uint8_t>(x.size());
      fill_random(codes.data(), codes.size(), 100.0f);
      code_scales = DeviceArray<float>(static_cast<std::size_t>(kSets) * kMaxRows);
      fill_random(code_scales.data(), code_scales.size(), 0.01f);
      h_codes = DeviceArray<std::uint8_t>(pairs * inner);
      h_scales = DeviceArray<float>(pairs);
    }
    h = DeviceArray<Bf16>(pairs * inner);
    y = DeviceArray<Bf16>(pairs * width);
    out = DeviceArray<Bf16>(kMaxRows * width);
    weights = DeviceArray<float>(pairs);
    row_scales = DeviceArray<float>(pairs);
    logits = DeviceArray<float>(kMaxRows * e);
    experts = DeviceArray<std::int32_t>(pairs);
    places = DeviceArray<std::int32_t>(pairs);
    rows = DeviceArray<std::int32_t>(pairs);
    tiles = DeviceArray<MoeTile>(moe_max_tiles(kMaxRows, m.num_experts, m.top_k, 8));
    counters = DeviceArray<std::int32_t>(2);
    members = DeviceArray<std::uint32_t>(moe_members(kMaxRows, m.num_experts));
    counters.fill(0);
    routing = {experts.data(),    weights.data(), places.data(),  rows.data(),
               row_scales.data(), tiles.data(),   members.data(), counters.data()};
  }

  void fill_weights(DeviceArray<std::uint8_t>& to, DeviceArray<float>& scales, std::size_t n, std::size_t k) {
    to = DeviceArray<std::uint8_t>(static_cast<std::size_t>(n * k * weight_bytes()));
    if (type != WeightType::kBf16) {
      fill_random(to.data(), to.size(), 100.0f);
      scales = DeviceArray<float>(group > 0 ? n * k / group : n);
      fill_random(scales.data(), scales.size(), group > 0 ? 0.005f : 0.0002f);
    } else {
      fill_random(reinterpret_cast<Bf16*>(to.data()), n * k, 0.02f);
    }
  }

  double weight_bytes() const { return type == WeightType::kInt4 ? 0.5 : type == WeightType::kBf16 ? 2.0 : 1.0; }
  double bytes_with_scales() const { return weight_bytes() + (group > 0 ? 5.0 / group : 0.0); }
  std::size_t row(int set) const { return static_cast<std::size_t>(set % kSets) * kMaxRows; }

  void route(int set, int m, int tokens, const Stream& stream) const {
    MoeRouteArgs args;
    args.x = x.data() + row(set) * model.hidden;
    args.x_scales = fp8 ? code_scales.data() + row(set) : nullptr;
    args.router = router.data();
    args.m = m;
    args.width = model.hidden;
    args.num_experts = model.num_experts;
    args.top_k = model.top_k;
    args.normalize = model.normalize;
    args.tokens = tokens;
    args.logits = logits.data();
    args.routing = routing;
    moe_route(args, stream);
  }
  MoeGemm gate_up_gemm(int set) const {
    MoeGemmProblem p;
    p.w = {type, 2 * model.intermediate, model.hidden, gate_up.data(), gate_up_scales.data(), zeros.data(), group};
    p.num_experts = model.num_experts;
    p.x = fp8 ? static_cast<const void*>(codes.data() + row(set) * model.hidden) : x.data() + row(set) * model.hidden;
    p.gathers = true;
    p.x_scales = row_scales.data();
    p.epilogue = Epilogue::kGated;
    p.y = h.data();
    return MoeGemm(p);
  }
  MoeGemm down_gemm() const {
    MoeGemmProblem p;
    p.w = {type, model.hidden, model.intermediate, down.data(), down_scales.data(), zeros.data(), group};
    p.num_experts = model.num_experts;
    p.x = fp8 ? static_cast<const void*>(h_codes.data()) : h.data();
    p.x_scales = h_scales.data();
    p.y = y.data();
    p.tiles_known = true;
    return MoeGemm(p);
  }
  void quantize(int pairs, const Stream& stream) const {
    if (!fp8) return;
    RmsNormArgs args;
    args.x = h.data();
    args.m = pairs;
    args.width = model.intermediate;
    args.y_fp8 = h_codes.data();
    args.y_scales = h_scales.data();
    rms_norm(args, stream);
  }
  void combine(int m, const Stream& stream) const {
    MoeCombineArgs args;
    args.y = y.data();
    args.residual = out.data();
    args.out = out.data();
    args.m = m;
    args.width = model.hidden;
    args.top_k = model.top_k;
    args.routing = routing;
    moe_combine(args, stream);
  }

  void run(int set, int m, int tokens, const MoeGemm& gate_up, const MoeGemm& down, const Stream& stream) const {
    const int pairs = m * model.top_k;
    route(set, m, tokens, stream);
    gate_up.launch(routing, pairs, tokens, stream);
    quantize(pairs, stream);
    down.launch(routing, pairs, tokens, stream);
    combine(m, stream);
  }

  void measure(int m, int tokens) const {
    const int pairs = m * model.top_k;
    const MoeGemm down_gemm = this->down_gemm();
    std::vector<MoeGemm> gate_ups;
    for (int set = 0; set < kSets; ++set) gate_ups.push_back(gate_up_gemm(set));
    double used = 0.0;  // experts, in the mean over sets
    for (int set = 0; set < kSets; ++set) {
      route(set, m, tokens, {});
      check(cudaDeviceSynchronize(), "route");
      std::vector<std::int32_t> chosen(static_cast<std::size_t>(pairs));
      check(cudaMemcpy(chosen.data(), experts.data(), chosen.size() * 4, cudaMemcpyDeviceToHost), "experts");
      used += static_cast<double>(std::set<std::int32_t>(chosen.begin(), chosen.end()).size()) / kSets;
    }
    // All sizes of tiles give the same bits, but for integers: a hash tells.
    check(cudaMemset(out.data(), 0, out.bytes()), "zero");
    run(0, m, tokens, gate_ups[0], down_gemm, {});
    std::vector<std::uint16_t> bits(static_cast<std::size_t>(m) * model.hidden);
    check(cudaMemcpy(bits.data(), out.data(), bits.size() * 2, cudaMemcpyDeviceToHost), "out");
    std::uint32_t hash = 2166136261u;
    for (const std::uint16_t value : bits) hash = (hash ^ value) * 16777619u;
    const int calls = m <= 64 ? 2 * kSets : m <= 512 ? kSets : kSets / 2;
    const int replays = m <= 64 ? 9 : 5;
    const double all = time_in_graph(
        calls,
        [&](int i, const Stream& stream) {
          run(i, m, tokens, gate_ups[static_cast<std::size_t>(i % kSets)], down_gemm, stream);
        },
        replays);
    const double routed = time_in_graph(calls, [&](int i, const Stream& s) { route(i, m, tokens, s); }, replays);
    route(0, m, tokens, {});
    check(cudaDeviceSynchronize(), "route");
    const double up = time_in_graph(
        calls,
        [&](int i, const Stream& s) {
          gate_ups[static_cast<std::size_t>(i % kSets)].launch(routing, pairs, tokens, s);
        },
        replays);
    const double quantized = fp8 ? time_in_graph(calls, [&](int, const Stream& s) { quantize(pairs, s); }, replays) : 0;
    const double downed =
        time_in_graph(calls, [&](int, const Stream& s) { down_gemm.launch(routing, pairs, tokens, s); }, replays);
    const double combined = time_in_graph(calls, [&](int, const Stream& s) { combine(m, s); }, replays);
    const double expert_bytes = 3.0 * model.hidden * model.intermediate * bytes_with_scales();
    const double flop = 6.0 * pairs * model.hidden * model.intermediate;
    std::printf(
        "%-8s %-7s m %4d tile %3d experts %5.1f | all %8.1f us %6.0f GB/s %6.1f TF | route %6.1f gate_up "
        "%8.1f quant %6.1f down %8.1f combine %6.1f | %08x\n",
        model.name, name, m, tokens, used, all * 1e6, used * expert_bytes / all * 1e-9, flop / all * 1e-12,
        routed * 1e6, up * 1e6, quantized * 1e6, downed * 1e6, combined * 1e6, hash);
    std::fflush(stdout);
  }
};

}  // namespace
}  // namespace aotllm::cuda

// Arguments: many = from 512 rows on; all = these with every size of tiles from 64 on, not only the one that is chosen;
// names of formats = those alone.
int main(int argc, char** argv) {
  using namespace aotllm::cuda;
  const std::set<std::string> named(argv + 1, argv + argc);
  const bool all = named.count("all") > 0;
  const bool many = named.count("many") > 0;
  const bool every_type = named.size() == (all ? 1 : 0) + (many ? 1 : 0);
  for (const Model& model : kModels) {
    for (const Format& format : kFormats) {
      if (!every_type && named.count(format.name) == 0) continue;
      const Bench bench(model, format);
      for (const int m : {1, 8, 64, 512, 2048, 4096}) {
        if (many && m < 512) continue;
        const int chosen = moe_tile_tokens(m, model.num_experts, model.top_k, format.type);
        for (const int tokens : {8, 16, 32, 64, 128, 160, 192, 320, 384}) {
          if (tokens > most_tokens(format.type)) continue;
          if (tokens == chosen || (all && m >= 512 && tokens >= 64)) bench.measure(m, tokens);
        }
      }
    }
  }
  return EXIT_SUCCESS;
}
