#include "runner/cuda/layer_chains.h"

#include <algorithm>
#include <optional>
#include <type_traits>
#include <variant>

#include "runner/cuda/linear_kernels.h"

namespace aotllm::cuda {
namespace {

constexpr std::array<int, 2> kRowsTiles = {8, 16};

std::size_t tile_of(int rows) {
  return rows <= kRowsTiles[0] ? 0 : 1;
}

bool runs_in(const StepShape& shape) {
  return shape.num_tiles == 0 && shape.num_queries > 0 && shape.rows <= kLayerMaxRows;
}

const Linear& linear_of(const Plan& plan, int index) {
  return plan.linears[static_cast<std::size_t>(index)];
}

template <class AnyOp>
bool reads(const AnyOp& op, int buffer) {
  bool result = false;
  if constexpr (requires { op.in; }) result = op.in == buffer;
  if constexpr (requires { op.residual; }) result = result || op.residual == buffer;
  return result;
}

template <class AnyOp>
bool writes(const AnyOp& op, int buffer) {
  if constexpr (requires { op.out; }) return op.out == buffer;
  return false;
}

/// Whether what `buffer` holds after op `index` is read by a later one.
bool is_read_after(const Plan& plan, std::size_t index, int buffer) {
  for (std::size_t i = index + 1; i < plan.ops.size(); ++i) {
    if (std::visit([buffer](const auto& op) { return reads(op, buffer); }, plan.ops[i])) return true;
    if (std::visit([buffer](const auto& op) { return writes(op, buffer); }, plan.ops[i])) return false;
  }
  return buffer == plan.leaving;
}

/// The ops of a layer from its attention on, as far as they are those that a chain has.
struct Layer {
  const PagedAttentionOp* attention = nullptr;
  const LinearResidualOp* output = nullptr;
  const NormSwigluOp* swiglu = nullptr;
  const LinearResidualOp* down = nullptr;
  const NormQkvRopeOp* qkv = nullptr;

  Layer(const Plan& plan, std::size_t begin) {
    const auto take = [&](auto& op, std::size_t index) {
      using AnyOp = std::remove_cvref_t<decltype(*op)>;
      if (index < plan.ops.size()) op = std::get_if<AnyOp>(&plan.ops[index]);
    };
    take(attention, begin - 1);
    take(output, begin);
    take(swiglu, begin + 1);
    take(down, begin + 2);
    take(qkv, begin + 3);
  }
};

bool is_plain(const LinearResidualOp& op) {
  return op.post_norm.empty() && op.residual != op.in;
}

/// The layer whose output projection is op `begin`.
std::optional<LayerOps> layer_ops(const Plan& plan, std::size_t begin) {
  const Layer layer(plan, begin);
  const auto& [attention, output, swiglu, down, qkv] = layer;
  if (attention == nullptr || output == nullptr || swiglu == nullptr || down == nullptr) return std::nullopt;
  if (!is_plain(*output) || !is_plain(*down) || swiglu->norm.empty()) return std::nullopt;
  const bool is_joined = output->in == attention->out && swiglu->in == output->out && down->in == swiglu->out &&
                         down->residual == output->out;
  if (!is_joined) return std::nullopt;
  // Neither is written: the chain's scratch holds codes of it.
  if (is_read_after(plan, begin, attention->out) || is_read_after(plan, begin + 2, swiglu->out)) return std::nullopt;

  const auto is_fp8 = [&](int linear) { return linear_of(plan, linear).matrix.format == MatrixFormat::kFp8; };
  if (!is_fp8(output->linear) || !is_fp8(swiglu->gate_up) || !is_fp8(down->linear)) return std::nullopt;
  const bool has_qkv = qkv != nullptr && qkv->in == down->out && !qkv->norm.empty() && is_fp8(qkv->linear);
  return LayerOps{begin, has_qkv};
}

/// What the chain of a layer computes.
class ProblemOf {
 public:
  ProblemOf(const Plan& plan, const WeightStore& weights, std::uint8_t* arena, __nv_bfloat16* qkv)
      : plan_(plan), weights_(weights), arena_(arena), qkv_(qkv) {}

  LayerProblem operator()(const LayerOps& ops) const {
    const Layer layer(plan_, ops.begin);
    LayerProblem problem;
    problem.activation = activation_of(layer.swiglu->activation);

    problem.linears.push_back(residual(*layer.output));
    set_norm(problem.linears.back(), *layer.swiglu);
    problem.linears.push_back(linear(layer.swiglu->gate_up, layer.swiglu->gate_up_bias, Epilogue::kGated));
    problem.linears.push_back(residual(*layer.down));
    if (!ops.has_qkv) return problem;
    set_norm(problem.linears.back(), *layer.qkv);
    problem.linears.push_back(linear(layer.qkv->linear, layer.qkv->bias, Epilogue::kStore));
    problem.linears.back().y = qkv_;
    return problem;
  }

 private:
  __nv_bfloat16* buffer(int index) const {
    return reinterpret_cast<__nv_bfloat16*>(arena_ + plan_.buffers[static_cast<std::size_t>(index)].offset);
  }

  LayerLinear linear(int index, std::span<const float> bias, Epilogue epilogue) const {
    LayerLinear made;
    made.w = weights_.matrix(linear_of(plan_, index));
    made.bias = weights_.find(bias);
    made.epilogue = epilogue;
    return made;
  }

  LayerLinear residual(const LinearResidualOp& op) const {
    LayerLinear made = linear(op.linear, op.bias, Epilogue::kResidual);
    made.residual = buffer(op.residual);
    made.y = buffer(op.out);
    return made;
  }

  template <class NormOp>
  void set_norm(LayerLinear& before, const NormOp& op) const {
    before.norm = weights_.find(op.norm);
    before.eps = op.eps;
  }

  const Plan& plan_;
  const WeightStore& weights_;
  std::uint8_t* arena_;
  __nv_bfloat16* qkv_;
};

}  // namespace

std::vector<LayerOps> find_layer_ops(const Plan& plan, bool deterministic) {
  std::vector<LayerOps> found;
  if (plan.sm < 90 || deterministic || plan.tp_size > 1) return found;
  for (std::size_t i = 1; i < plan.ops.size(); ++i) {
    if (const auto ops = layer_ops(plan, i)) found.push_back(*ops);
  }
  return found;
}

LayerChains::LayerChains(const Plan& plan, const WeightStore& weights, bool deterministic, std::uint8_t* arena,
                         __nv_bfloat16* qkv, Workspace workspace) {
  const std::vector<LayerOps> found = find_layer_ops(plan, deterministic);
  if (found.empty()) return;
  const ProblemOf problem_of(plan, weights, arena, qkv);
  std::vector<LayerProblem> problems(found.size());
  std::transform(found.begin(), found.end(), problems.begin(), problem_of);
  scratch_ = std::make_unique<LayerScratch>(problems);
  for (std::size_t i = 0; i < found.size(); ++i) {
    Chain chain{found[i], {}};
    for (std::size_t tile = 0; tile < kRowsTiles.size(); ++tile) {
      chain.gemms[tile] = make_layer_gemms(problems[i], kRowsTiles[tile], *scratch_, workspace);
    }
    const auto is_made = [](const auto& gemms) { return gemms != nullptr; };
    if (std::ranges::all_of(chain.gemms, is_made)) chains_.emplace(found[i].begin, std::move(chain));
  }
}

const LayerChains::Chain* LayerChains::find(std::size_t index, const StepShape& shape) const {
  if (!runs_in(shape)) return nullptr;
  const auto it = chains_.find(index);
  return it == chains_.end() ? nullptr : &it->second;
}

GroupCodes LayerChains::codes_after(std::size_t index, const StepShape& shape) const {
  if (find(index + 1, shape) == nullptr) return {};
  return scratch_->input(0, kRowsTiles[tile_of(shape.rows)]);
}

void LayerChains::launch(const Chain& chain, int rows, const Stream& stream) const {
  chain.gemms[tile_of(rows)]->launch(rows, stream);
}

}  // namespace aotllm::cuda
