// Decode steps of Llama-3.1-8B, layer by layer: norm → QKV → RoPE and KV → attention → output + residual → norm →
// gate and up → down + residual, in a CUDA graph with programmatic launches, weights of 8 layers. What a plan of a
// skinny GEMM is worth shows here, where its neighbours leave it time to load ahead.
//
//   bench_layer TYPE M [VARIANT...]      TYPE bf16, fp8 or fp8_block; M rows, 1 to 64
//
// A variant is LINEAR=PLAN[/LINEAR=PLAN...], LINEAR one of qkv, o, up, down; PLAN is what to change of the default one:
// 64x2 (rows × columns), sN stages, gN grid, wN whole, cN cluster, eN early, pN prefetch, joined by commas. "default"
// is the default; with a leading + the time of each kernel is printed too.
// "layer", or "layer:" and a variant, chains the products between two attentions (gemm/layer_gemms.h).
// --search as the first variant makes the others changes to try, in turn, of the fastest plans so far: as often as that
// finds anything, at most three times.

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "bench/plan_text.h"
#include "bench/random_data.cuh"
#include "bench/timing.h"
#include "device_array.h"
#include "elementwise/elementwise.h"
#include "gemm/layer_gemms.h"
#include "gemm/skinny_gemm.h"

namespace aotllm::cuda {
namespace {

constexpr double kReadLimit = 4265e9;  // bytes/s
constexpr int kLayers = 8;
constexpr int kHidden = 4096;
constexpr int kInner = 14336;
constexpr int kHeads = 32;
constexpr int kKvHeads = 8;
constexpr int kHeadDim = 128;
constexpr int kContext = 200;
constexpr int kTokensPerBlock = 64;
constexpr int kBlocks = (kContext + kTokensPerBlock - 1) / kTokensPerBlock;  // of a sequence
constexpr int kMaxRows = 64;

struct Shape {
  const char* name;
  int n, k;
  Epilogue epilogue;
};
enum Which { kQkv, kOutput, kGateUp, kDown, kLinears };
constexpr std::array<Shape, kLinears> kShapes = {{{"qkv", 6144, kHidden, Epilogue::kStore},
                                                  {"o", kHidden, kHidden, Epilogue::kResidual},
                                                  {"up", 2 * kInner, kHidden, Epilogue::kGated},
                                                  {"down", kHidden, kInner, Epilogue::kResidual}}};
using Plans = std::array<SkinnyPlan, kLinears>;

int rows_tile_of(int m) {
  return m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64;
}

/// When the kernel before it ended.
__global__ void stamp(unsigned long long* at) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(*at));
}

class Model {
 public:
  Model(WeightType type, int m) : type_(type), m_(m) {
    std::size_t bytes = 0;
    for (const Shape& shape : kShapes) bytes += bytes_of(shape);
    weights_ = DeviceArray<std::uint8_t>(kLayers * bytes);
    if (type == WeightType::kBf16) {
      fill_random(reinterpret_cast<__nv_bfloat16*>(weights_.data()), weights_.size() / 2, 1.0f / 80);
    } else {
      fill_random(weights_.data(), weights_.size(), 16.0f);
    }
    fill_random(hidden_.data(), hidden_.size(), 1.0f);
    fill_random(norm_weight_.data(), norm_weight_.size(), 1.0f);
    fill_random(inv_freq_.data(), inv_freq_.size(), 0.01f);
    fill_random(reinterpret_cast<__nv_bfloat16*>(cache_.data()), cache_.size() / 2, 1.0f);
    scales_.upload(std::vector<float>(scales_.size(), 1.0f / (16 * 80)));
    scratch_.fill(0);
    attention_workspace_.fill(0);
    for (DeviceArray<__nv_bfloat16>* array : {&normed_, &qkv_, &q_, &attended_, &inner_}) array->fill(0);
    codes_.fill(0);
    code_scales_.fill(0);
    std::vector<std::int32_t> positions(kMaxRows, kContext - 1), sequences(kMaxRows), table(kMaxRows * kBlocks);
    std::vector<DecodeQuery> queries(kMaxRows);
    for (int i = 0; i < kMaxRows; ++i) sequences[i] = i, queries[i] = {i, i, kContext};
    for (int i = 0; i < kMaxRows * kBlocks; ++i) table[i] = i * 37 % (kMaxRows * kBlocks);
    positions_.upload(positions);
    sequences_.upload(sequences);
    table_.upload(table);
    queries_.upload(queries);
  }

  /// Of all weights of a layer.
  double limit_seconds() const { return static_cast<double>(weights_.size()) / kLayers / kReadLimit; }

  Plans default_plans() const {
    Plans plans;
    for (int i = 0; i < kLinears; ++i) {
      plans[i] = default_skinny_plan(type_, kShapes[i].n, kShapes[i].k, rows_tile_of(m_), 132);
    }
    return plans;
  }

  /// False where there is no kernel for a plan.
  bool set_plans(const Plans& plans) {
    gemms_.clear();
    layers_.clear();
    std::size_t offset = 0;
    for (int i = 0; i < kLayers * kLinears; ++i) {
      gemms_.push_back(make(static_cast<Which>(i % kLinears), offset, plans[i % kLinears]));
      if (gemms_.back() == nullptr) return false;
      offset += bytes_of(kShapes[i % kLinears]);
    }
    return true;
  }

  /// Likewise, of products that are chained.
  bool set_layers(const Plans& plans) {
    layers_.clear();
    std::vector<LayerProblem> problems;
    for (int i = 0; i < kLayers; ++i) problems.push_back(layer_problem(i));
    layer_scratch_ = std::make_unique<LayerScratch>(problems);
    const std::array<SkinnyPlan, kLinears> of = {plans[kOutput], plans[kGateUp], plans[kDown], plans[kQkv]};
    for (const LayerProblem& problem : problems) {
      layers_.push_back(
          make_layer_gemms(problem, rows_tile_of(m_), *layer_scratch_, {scratch_.data(), scratch_.bytes()}, of));
      if (layers_.back() == nullptr) return layers_.clear(), false;
    }
    return true;
  }

  double seconds_per_layer(int replays = 25) const {
    return time_in_graph(kLayers, [&](int i, const Stream& stream) { layer(i, stream, nullptr); }, replays);
  }

  /// Prints how much later than its predecessor each kernel ended, µs; the stamps take part of it.
  void print_kernels() {
    constexpr int kMost = 16;
    constexpr int kReplays = 20;
    DeviceArray<unsigned long long> times(kLayers * kMost);
    std::vector<const char*> names;
    std::vector<double> total(kMost);
    const auto mark = [&](int i, int at, const char* name, const Stream& stream) {
      launch(stamp, dim3(1), dim3(1), 0, stream, times.data() + i * kMost + at);
      if (static_cast<int>(names.size()) <= at) names.push_back(name);
    };
    for (int replay = 0; replay < kReplays; ++replay) {
      time_in_graph(
          kLayers,
          [&](int i, const Stream& stream) {
            int at = 0;
            layer(i, stream, [&](const char* name) { mark(i, at++, name, stream); });
          },
          1);
      const auto got = times.download();
      for (int i = 1; i < kLayers; ++i) {
        const int last = static_cast<int>(names.size()) - 1;
        for (int at = 0; at <= last; ++at) {
          const auto before = at > 0 ? got[i * kMost + at - 1] : got[(i - 1) * kMost + last];
          total[at] += static_cast<double>(got[i * kMost + at] - before) * 1e-3 / ((kLayers - 1) * kReplays);
        }
      }
    }
    std::printf("   ");
    for (std::size_t at = 0; at < names.size(); ++at) std::printf(" %s %.1f", names[at], total[at]);
    std::printf("\n");
  }

 private:
  std::size_t bytes_of(const Shape& shape) const {
    return static_cast<std::size_t>(shape.n) * shape.k * (type_ == WeightType::kBf16 ? 2 : 1);
  }

  std::size_t offset_of(int layer, Which which) const {
    std::size_t offset = 0;
    for (int i = 0; i < layer * kLinears + which; ++i) offset += bytes_of(kShapes[i % kLinears]);
    return offset;
  }

  LayerProblem layer_problem(int layer) {
    LayerProblem problem;
    for (const Which which : {kOutput, kGateUp, kDown, kQkv}) {
      const Shape& shape = kShapes[which];
      LayerLinear linear;
      const int from = which == kQkv ? (layer + 1) % kLayers : layer;
      linear.w = {type_, shape.n, shape.k, weights_.data() + offset_of(from, which), scales_.data(), nullptr};
      linear.epilogue = shape.epilogue;
      linear.residual = hidden_.data();
      linear.y = which == kQkv ? qkv_.data() : hidden_.data();
      linear.norm = norm_weight_.data();
      linear.eps = 1e-5f;
      problem.linears.push_back(linear);
    }
    return problem;
  }

  std::unique_ptr<Gemm> make(Which which, std::size_t offset, const SkinnyPlan& plan) {
    const Shape& shape = kShapes[which];
    const __nv_bfloat16* inputs[] = {normed_.data(), attended_.data(), normed_.data(), inner_.data()};
    void* outputs[] = {qkv_.data(), hidden_.data(), inner_.data(), hidden_.data()};
    GemmProblem problem;
    problem.w = {type_, shape.n, shape.k, weights_.data() + offset, scales_.data(), nullptr};
    problem.x = type_ == WeightType::kBf16 ? static_cast<const void*>(inputs[which]) : codes_.data();
    problem.x_scales = code_scales_.data();
    problem.max_m = kMaxRows;
    problem.epilogue = shape.epilogue;
    problem.residual = hidden_.data();
    problem.y = outputs[which];
    return make_skinny_gemm(problem, rows_tile_of(m_), {scratch_.data(), scratch_.bytes()}, plan);
  }

  /// Of `weight` null: quantization only, which bf16 does not need.
  template <class Mark>
  void norm(const char* name, const __nv_bfloat16* x, int width, const float* weight, const Stream& stream,
            const Mark& mark) const {
    const bool bf16 = type_ == WeightType::kBf16;
    if (bf16 && weight == nullptr) return;
    RmsNormArgs args{x, nullptr, weight, 1e-5f, m_, width};
    if (bf16) {
      args.y = normed_.data();
    } else {
      args.y_fp8 = codes_.data();
      args.y_scales = code_scales_.data();
      args.per_block = type_ == WeightType::kFp8Block;
    }
    rms_norm(args, stream);
    mark(name);
  }

  KvLayerView kv(int layer) const {
    const std::size_t stride = std::size_t{2} * kKvHeads * kTokensPerBlock * kHeadDim * 2;
    const int blocks = kMaxRows * kBlocks;
    return {KvType::kBf16,   cache_.data() + layer * blocks * stride,
            stride,          blocks,
            kKvHeads,        kHeadDim,
            kTokensPerBlock, table_.data(),
            kBlocks};
  }

  template <class Mark>
  void attention(int layer, const Stream& stream, const Mark& mark) const {
    RopeKvArgs rope;
    rope.qkv = qkv_.data();
    rope.q = q_.data();
    rope.m = m_;
    rope.num_heads = kHeads;
    rope.num_kv_heads = kKvHeads;
    rope.head_dim = kHeadDim;
    rope.inv_freq = inv_freq_.data();
    rope.rotary_half = kHeadDim / 2;
    rope.positions = positions_.data();
    rope.sequences = sequences_.data();
    rope.kv = kv(layer);
    DecodeAttentionArgs args;
    if (decode_prefers_fused(rope, KvType::kBf16, m_, kBlocks * kTokensPerBlock, kTokensPerBlock)) {
      args.fused = &rope;
    } else {
      rope_kv(rope, stream);
      mark("rope");
    }
    args.q = q_.data();
    args.out = attended_.data();
    args.num_heads = kHeads;
    args.scale = 0.08838834764f;
    args.kv = kv(layer);
    args.queries = queries_.data();
    args.num_queries = m_;
    args.max_context = kBlocks * kTokensPerBlock;
    args.split_tokens = decode_split_tokens(m_, kKvHeads, args.max_context, kTokensPerBlock);
    args.workspace = attention_workspace_.data();
    args.workspace_bytes = attention_workspace_.bytes();
    if (!layers_.empty()) args.codes = layer_scratch_->input(0, rows_tile_of(m_));
    decode_attention(args, stream);
    mark("attention");
  }

  template <class Mark>
  void layer(int index, const Stream& stream, const Mark& optional_mark) const {
    const auto mark = [&](const char* name) {
      if constexpr (!std::is_same_v<Mark, std::nullptr_t>) optional_mark(name);
    };
    const auto linear = [&](Which which) {
      gemms_[static_cast<std::size_t>(index * kLinears + which)]->launch(m_, stream);
      mark(kShapes[which].name);
    };
    if (!layers_.empty()) {
      attention(index, stream, mark);
      layers_[static_cast<std::size_t>(index)]->launch(m_, stream);
      mark("layer");
      return;
    }
    norm("norm", hidden_.data(), kHidden, norm_weight_.data(), stream, mark);
    linear(kQkv);
    attention(index, stream, mark);
    norm("quant", attended_.data(), kHidden, nullptr, stream, mark);
    linear(kOutput);
    norm("norm", hidden_.data(), kHidden, norm_weight_.data(), stream, mark);
    linear(kGateUp);
    norm("quant", inner_.data(), kInner, nullptr, stream, mark);
    linear(kDown);
  }

  WeightType type_;
  int m_;
  DeviceArray<std::uint8_t> weights_;
  DeviceArray<std::uint8_t> scratch_{kWorkspaceBytes};
  DeviceArray<std::uint8_t> attention_workspace_{std::size_t{64} << 20};
  DeviceArray<std::uint8_t> cache_{std::size_t{kLayers} * kMaxRows * kBlocks * 2 * kKvHeads * kTokensPerBlock *
                                   kHeadDim * 2};
  DeviceArray<__nv_bfloat16> hidden_{kMaxRows * kHidden}, normed_{kMaxRows * kHidden}, qkv_{kMaxRows * 6144},
      q_{kMaxRows * kHidden}, attended_{kMaxRows * kHidden}, inner_{kMaxRows * kInner};
  DeviceArray<std::uint8_t> codes_{kMaxRows * kInner};
  DeviceArray<float> code_scales_{kMaxRows * kInner / 128}, scales_{2 * kInner * 128}, norm_weight_{kInner},
      inv_freq_{kHeadDim / 2};
  DeviceArray<std::int32_t> positions_{kMaxRows}, sequences_{kMaxRows}, table_{kMaxRows * kBlocks};
  DeviceArray<DecodeQuery> queries_{kMaxRows};
  std::vector<std::unique_ptr<Gemm>> gemms_;
  std::unique_ptr<LayerScratch> layer_scratch_;
  std::vector<std::unique_ptr<LayerGemms>> layers_;  ///< in place of gemms_, where there are any
};

bool change(Plans& plans, const std::string& variant) {
  if (variant == "default") return true;
  for (const std::string& part : split(variant, '/')) {
    const std::size_t equals = part.find('=');
    int which = 0;
    while (which < kLinears && part.substr(0, equals) != kShapes[which].name) ++which;
    if (equals == std::string::npos || which == kLinears) return false;
    for (const std::string& item : split(part.substr(equals + 1), ',')) {
      if (!change(plans[which], item)) return false;
    }
  }
  return true;
}

/// Coordinate descent from the default plans; prints what every step is worth.
void search(Model& model, const std::vector<std::string>& changes) {
  Plans best = model.default_plans();
  model.set_plans(best);
  double least = model.seconds_per_layer();
  std::printf("  %7.2f µs  default\n", least * 1e6);
  for (int pass = 0; pass < 3; ++pass) {
    const double before = least;
    for (const std::string& variant : changes) {
      Plans plans = best;
      if (!change(plans, variant) || !model.set_plans(plans)) {
        if (pass == 0) std::printf("  no kernel: %s\n", variant.c_str());
        continue;
      }
      const double seconds = model.seconds_per_layer(9);
      const bool better = seconds < least * 0.9985 && model.seconds_per_layer() < least * 0.9985;
      if (pass == 0 || better) std::printf("  %7.2f µs%s %s\n", seconds * 1e6, better ? " *" : "  ", variant.c_str());
      if (better) best = plans, least = seconds;
    }
    if (least > before * 0.998) break;
  }
  model.set_plans(best);
  std::printf("  %7.2f µs  best:", model.seconds_per_layer() * 1e6);
  for (int i = 0; i < kLinears; ++i) std::printf(" %s=%s", kShapes[i].name, describe(best[i]).c_str());
  std::printf("\n");
  model.print_kernels();
}

int run(int argc, char** argv) {
  const std::map<std::string, WeightType> types = {
      {"bf16", WeightType::kBf16}, {"fp8", WeightType::kFp8}, {"fp8_block", WeightType::kFp8Block}};
  const int m = argc > 2 ? std::atoi(argv[2]) : 0;
  if (m < 1 || m > kMaxRows || !types.contains(argv[1])) {
    std::fprintf(stderr, "usage: bench_layer bf16|fp8|fp8_block ROWS [VARIANT...]\n");
    return 2;
  }
  Model model(types.at(argv[1]), m);
  std::printf("%s m=%d, weights alone %.1f µs\n", argv[1], m, model.limit_seconds() * 1e6);
  if (argc > 3 && std::strcmp(argv[3], "--search") == 0) {
    search(model, {argv + 4, argv + argc});
    return 0;
  }
  for (int i = 3; i < argc; ++i) {
    const bool kernels = argv[i][0] == '+';
    const std::string variant = argv[i] + kernels;
    const bool chained = variant.starts_with("layer");
    const std::string changes = !chained ? variant : variant == "layer" ? "default" : variant.substr(6);
    Plans plans = model.default_plans();
    if (!change(plans, changes)) {
      std::fprintf(stderr, "no such variant: %s\n", variant.c_str());
      return 2;
    }
    if (!model.set_plans(plans) || (chained && !model.set_layers(plans))) {
      std::printf("  no kernel: %s\n", variant.c_str());
      continue;
    }
    std::printf("  %7.2f µs  %s\n", model.seconds_per_layer() * 1e6, variant.c_str());
    if (kernels) model.print_kernels();
    std::fflush(stdout);
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
