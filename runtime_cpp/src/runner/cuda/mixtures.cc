#include "runner/cuda/mixtures.h"

#include <algorithm>

#include "aotllm/errors.h"
#include "elementwise/elementwise.h"
#include "gemm/int_layout.h"
#include "runner/cuda/linear_kernels.h"
#include "support/strings.h"

namespace aotllm::cuda {
namespace {

constexpr int kFewestTokens = 8;  // of a tile: the case of most tiles

/// The largest sizes of the mixtures of a plan, in elements.
struct Sizes {
  std::size_t logits = 0;
  std::size_t pairs = 0;
  std::size_t tiles = 0;
  std::size_t members = 0;
  std::size_t gated = 0;
  std::size_t gated_codes = 0;
  std::size_t outputs = 0;

  void add(const NormMoeOp& op, int rows, int width, bool fp8) {
    const auto grow = [](std::size_t& size, std::size_t other) { size = std::max(size, other); };
    const auto own = static_cast<std::size_t>(rows) * static_cast<std::size_t>(op.top_k);
    const auto neurons = static_cast<std::size_t>(op.neurons);
    grow(logits, static_cast<std::size_t>(rows) * static_cast<std::size_t>(op.num_experts));
    grow(pairs, own);
    grow(tiles, static_cast<std::size_t>(moe_max_tiles(rows, op.num_experts, op.top_k, kFewestTokens)));
    grow(members, moe_members(rows, op.num_experts));
    grow(gated, own * neurons);
    grow(gated_codes, fp8 ? own * neurons : 0);
    grow(outputs, own * static_cast<std::size_t>(width));
  }
};

}  // namespace

Mixtures::Mixtures(const Plan& plan, const WeightStore& weights, bool deterministic)
    : plan_(plan), weights_(weights), deterministic_(deterministic) {
  Sizes sizes;
  for (const Op& op : plan.ops) {
    const auto* moe = std::get_if<NormMoeOp>(&op);
    if (moe == nullptr) continue;
    sizes.add(*moe, plan.device_rows(), plan.buffers[static_cast<std::size_t>(moe->in)].width, is_fp8(*moe));
  }
  logits_ = DeviceArray<float>(sizes.logits);
  experts_ = DeviceArray<std::int32_t>(sizes.pairs);
  pair_weights_ = DeviceArray<float>(sizes.pairs);
  places_ = DeviceArray<std::int32_t>(sizes.pairs);
  rows_ = DeviceArray<std::int32_t>(sizes.pairs);
  row_scales_ = DeviceArray<float>(sizes.pairs);
  tiles_ = DeviceArray<MoeTile>(sizes.tiles);
  members_ = DeviceArray<std::uint32_t>(sizes.members);
  counters_ = DeviceArray<std::int32_t>(2);
  gated_ = DeviceArray<Bf16>(sizes.gated);
  gated_codes_ = DeviceArray<std::uint8_t>(sizes.gated_codes);
  gated_scales_ = DeviceArray<float>(sizes.gated_codes == 0 ? 0 : sizes.pairs);
  outputs_ = DeviceArray<Bf16>(sizes.outputs);
  counters_.fill(0);
}

bool Mixtures::is_fp8(const NormMoeOp& op) const {
  return plan_.linears[static_cast<std::size_t>(op.gate_up)].matrix.format == MatrixFormat::kFp8;
}

/// All experts' matrices; n is one expert's.
Weights Mixtures::weights_of(int linear, int num_experts) const {
  const Linear& l = plan_.linears[static_cast<std::size_t>(linear)];
  Weights w = weights_.matrix(l);
  if (w.type == WeightType::kFp8Block) {
    throw Error(ErrorKind::kEngineIncompatible, cat("experts' linear \"", l.name,
                                                    "\" is fp8_block, which no kernel of this build takes; build the "
                                                    "engine with this version of aotllm"));
  }
  w.n /= num_experts;
  return w;
}

/// Places of a tile. Of integers the rounding of small ones depends on it, and it on how many rows there are.
int Mixtures::tile_tokens(const NormMoeOp& op, int rows) const {
  const WeightType type = weight_type(plan_.linears[static_cast<std::size_t>(op.gate_up)].matrix.format);
  const int tokens = moe_tile_tokens(rows, op.num_experts, op.top_k, type);
  return deterministic_ && has_integers(type) ? std::max(tokens, kMoeAlikeIntTokens) : tokens;
}

int Mixtures::add(const NormMoeOp& op, const MixtureInput& input) {
  const Weights gate_up = weights_of(op.gate_up, op.num_experts);
  const Weights down = weights_of(op.down, op.num_experts);
  if (op.num_experts > kMoeMaxExperts || op.top_k > kMoeMaxTopK || gate_up.type != down.type) {
    throw Error(ErrorKind::kEngineIncompatible,
                cat("a mixture of ", op.num_experts, " experts of which a token takes ", op.top_k,
                    "; the kernels take ", kMoeMaxExperts, " and ", kMoeMaxTopK, ", all matrices in one format"));
  }
  const bool fp8 = gate_up.type == WeightType::kFp8;
  MoeGemmProblem first;
  first.w = gate_up;
  first.num_experts = op.num_experts;
  first.x = fp8 ? static_cast<const void*>(input.codes) : input.x;
  first.gathers = true;
  first.x_scales = fp8 ? row_scales_.data() : nullptr;
  first.epilogue = Epilogue::kGated;
  first.activation = activation_of(op.activation);
  first.y = gated_.data();
  MoeGemmProblem second;
  second.w = down;
  second.num_experts = op.num_experts;
  second.x = fp8 ? static_cast<const void*>(gated_codes_.data()) : gated_.data();
  second.x_scales = fp8 ? gated_scales_.data() : nullptr;
  second.y = outputs_.data();
  second.tiles_known = true;
  mixtures_.push_back({op, input, MoeGemm(first), MoeGemm(second)});
  return static_cast<int>(mixtures_.size()) - 1;
}

MoeRouting Mixtures::routing() const {
  MoeRouting routing;
  routing.experts = experts_.data();
  routing.weights = pair_weights_.data();
  routing.places = places_.data();
  routing.rows = rows_.data();
  routing.row_scales = row_scales_.data();
  routing.tiles = tiles_.data();
  routing.members = members_.data();
  routing.counters = counters_.data();
  return routing;
}

void Mixtures::launch(int index, const Launch& launch, const Stream& stream) const {
  const Mixture& mixture = mixtures_[static_cast<std::size_t>(index)];
  const NormMoeOp& op = mixture.op;
  const int width = plan_.buffers[static_cast<std::size_t>(op.in)].width;
  const int tokens = tile_tokens(op, launch.rows);
  const int pairs = launch.rows * op.top_k;
  MoeRouteArgs route;
  route.x = mixture.input.x;
  route.x_scales = is_fp8(op) ? mixture.input.scales : nullptr;
  route.router = weights_.find(op.router);
  route.m = launch.rows;
  route.width = width;
  route.num_experts = op.num_experts;
  route.top_k = op.top_k;
  route.normalize = op.normalize;
  route.tokens = tokens;
  route.sequences = launch.sequences;
  route.logits = logits_.data();
  route.routing = routing();
  moe_route(route, stream);
  mixture.gate_up.launch(route.routing, pairs, tokens, stream);
  if (is_fp8(op)) {
    RmsNormArgs quantized;
    quantized.x = gated_.data();
    quantized.m = pairs;
    quantized.width = op.neurons;
    quantized.y_fp8 = gated_codes_.data();
    quantized.y_scales = gated_scales_.data();
    rms_norm(quantized, stream);
  }
  mixture.down.launch(route.routing, pairs, tokens, stream);
  MoeCombineArgs combine;
  combine.y = outputs_.data();
  combine.residual = launch.residual;
  combine.out = launch.out;
  combine.m = launch.rows;
  combine.width = width;
  combine.top_k = op.top_k;
  combine.routing = route.routing;
  moe_combine(combine, stream);
}

}  // namespace aotllm::cuda
