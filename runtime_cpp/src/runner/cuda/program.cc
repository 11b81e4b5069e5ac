#include "runner/cuda/program.h"

#include <algorithm>

#include "aotllm/errors.h"
#include "elementwise/elementwise.h"
#include "runner/cuda/buckets.h"
#include "runner/cuda/device.h"
#include "sampling/sampling.h"
#include "support/strings.h"

namespace aotllm::cuda {
namespace {

/// The linear that an op multiplies by; -1 for ops without.
struct LinearOf {
  int operator()(const EmbeddingOp&) const { return -1; }
  int operator()(const PagedAttentionOp&) const { return -1; }
  int operator()(const NormMoeOp&) const { return -1; }  // experts have kernels of their own
  int operator()(const NormSwigluOp& op) const { return op.gate_up; }
  template <class AnyOp>
  int operator()(const AnyOp& op) const {
    return op.linear;
  }
};

template <class T>
T* zeroed(DeviceArray<T>& array) {
  array.fill(0);
  return array.data();
}

}  // namespace

int head_rows(const Plan& plan) {
  return (std::max(plan.max_batch_size, kMinHeadRows) + 7) / 8 * 8;
}

CommunicatorLimits communicator_limits(const Plan& plan) {
  int width = 0;
  for (const Op& op : plan.ops) {
    const int index = std::visit(LinearOf{}, op);
    if (const auto* embedding = std::get_if<EmbeddingOp>(&op)) {
      width = std::max(width, plan.linears[static_cast<std::size_t>(embedding->linear)].k);
    } else if (std::holds_alternative<LinearResidualOp>(op)) {
      width = std::max(width, plan.linears[static_cast<std::size_t>(index)].n);
    }
  }
  const int gathered_rows = plan.is_last_stage() ? head_rows(plan) : 0;
  return {static_cast<std::size_t>(plan.device_rows()) * static_cast<std::size_t>(width),
          static_cast<std::size_t>(gathered_rows) * static_cast<std::size_t>(plan.vocab_size)};
}

Program::Program(const Plan& plan, const WeightStore& weights, const ProgramOptions& options, Communicator* ranks)
    : plan_(plan),
      weights_(weights),
      ranks_(ranks),
      deterministic_(options.deterministic),
      workspace_(gemm_workspace_bytes(plan)),
      kernels_({zeroed(workspace_), workspace_.size()}, options.cublaslt, options.deterministic,
               TacticTable::parse(options.tactics), plan.sm),
      mixtures_(plan, weights, options.deterministic) {
  if (plan.tp_size != (ranks == nullptr ? 1 : ranks->size())) {
    throw Error(ErrorKind::kInternal, cat("a plan of ", plan.tp_size, " ranks is run by another number of them"));
  }
  head_rows_ = cuda::head_rows(plan);
  reserve_scratch();
  for (const Op& op : plan.ops) ops_.push_back({op, bind(op)});
  chains_ = LayerChains(plan, weights, deterministic_, arena_.data(), product_.data(),
                        {workspace_.data(), workspace_.size()});
}

void Program::reserve_scratch() {
  const auto rows = static_cast<std::size_t>(plan_.device_rows());
  std::size_t normed = 0;
  std::size_t codes = 0;
  std::size_t product = 0;
  for (const Op& op : plan_.ops) {
    if (const auto* moe = std::get_if<NormMoeOp>(&op)) {  // routers read bf16, experts perhaps codes
      const Linear& experts = plan_.linears[static_cast<std::size_t>(moe->gate_up)];
      const auto width = static_cast<std::size_t>(experts.k);
      normed = std::max(normed, width);
      if (takes_codes(experts)) codes = std::max(codes, width);
      if (moe->all_reduce) product = std::max(product, width);
    }
    const int index = std::visit(LinearOf{}, op);
    if (index < 0) continue;
    const Linear& linear = plan_.linears[static_cast<std::size_t>(index)];
    const auto k = static_cast<std::size_t>(linear.k);
    std::size_t& width = takes_codes(linear) ? codes : normed;
    width = std::max(width, k);
    const auto* residual = std::get_if<LinearResidualOp>(&op);
    const bool is_added_later = residual != nullptr && (sums_ranks(*residual) || !residual->post_norm.empty());
    if (std::holds_alternative<NormQkvRopeOp>(op) || is_added_later) {
      product = std::max(product, static_cast<std::size_t>(linear.n));
    }
  }
  const auto head = plan_.is_last_stage() ? static_cast<std::size_t>(head_rows_) : 0;
  arena_ = DeviceArray<std::uint8_t>(static_cast<std::size_t>(plan_.arena_bytes));
  normed_ = DeviceArray<Bf16>(rows * normed);
  codes_ = DeviceArray<std::uint8_t>(rows * codes);
  code_scales_ = DeviceArray<float>(codes == 0 ? 0 : rows * ((codes + 127) / 128));
  product_ = DeviceArray<Bf16>(rows * product);
  head_input_ = DeviceArray<Bf16>(head * static_cast<std::size_t>(plan_.hidden_size));
  logits_ = DeviceArray<float>(head * static_cast<std::size_t>(plan_.vocab_size / plan_.tp_size));
  sampling_workspace_ =
      DeviceArray<std::uint8_t>(head == 0 ? 0 : sampling_workspace_bytes(head_rows_, plan_.vocab_size, plan_.sm));
  // What no step has written yet is read by tiles that reach beyond the rows of a step.
  for (DeviceArray<Bf16>* array : {&normed_, &product_, &head_input_}) array->fill(0);
  arena_.fill(0);
  codes_.fill(0);
  code_scales_.fill(0);
  logits_.fill(0);
  sampling_workspace_.fill(0);

  std::size_t attention = 0;
  for (const Op& op : plan_.ops) {
    const auto* paged = std::get_if<PagedAttentionOp>(&op);
    if (paged == nullptr || deterministic_) continue;
    const int most = batch_bucket(std::min(plan_.max_batch_size, plan_.max_num_tokens));
    for (int queries = 1; queries <= most; queries = batch_bucket(queries + 1)) {
      for (int context = 1;; context = context_bucket(context, plan_.max_seq_len) + 1) {
        const int bucket = context_bucket(context, plan_.max_seq_len);
        const Heads& h = paged->heads;
        const int split = decode_split_tokens(queries, h.num_kv_heads, bucket, plan_.kv.tokens_per_block);
        attention = std::max(attention, decode_workspace_bytes(queries, h.num_heads, h.head_dim, bucket, split));
        if (bucket >= plan_.max_seq_len) break;
      }
    }
  }
  attention_workspace_ = DeviceArray<std::uint8_t>(attention);
  attention_workspace_.fill(0);
}

Program::Bf16* Program::buffer(int index) const {
  return reinterpret_cast<Bf16*>(arena_.data() + plan_.buffers[static_cast<std::size_t>(index)].offset);
}

/// A linear that reads `bf16_input`, or its codes.
GemmProblem Program::problem(int index, const void* bf16_input) const {
  const Linear& linear = plan_.linears[static_cast<std::size_t>(index)];
  GemmProblem p;
  p.w = weights_.matrix(linear);
  p.x = takes_codes(linear) ? static_cast<const void*>(codes_.data()) : bf16_input;
  p.x_scales = takes_codes(linear) ? code_scales_.data() : nullptr;
  p.max_m = plan_.device_rows();
  return p;
}

/// Makes the kernels of an op's linear.
int Program::bind(const Op& op) {
  if (const auto* moe = std::get_if<NormMoeOp>(&op)) {
    return mixtures_.add(*moe, {normed_.data(), codes_.data(), code_scales_.data()});
  }
  const int index = std::visit(LinearOf{}, op);
  if (index < 0) return -1;
  GemmProblem p = problem(index, normed_.data());
  if (const auto* qkv = std::get_if<NormQkvRopeOp>(&op)) {
    p.bias = weights_.find(qkv->bias);
    p.y = product_.data();
  } else if (const auto* residual = std::get_if<LinearResidualOp>(&op)) {
    p = problem(index, buffer(residual->in));
    if (!sums_ranks(*residual)) p.bias = weights_.find(residual->bias);  // else it is added to the sum
    if (!sums_ranks(*residual) && residual->post_norm.empty()) {
      p.epilogue = Epilogue::kResidual;
      p.residual = buffer(residual->residual);
      p.y = buffer(residual->out);
    } else {
      p.y = product_.data();
    }
  } else if (const auto* swiglu = std::get_if<NormSwigluOp>(&op)) {
    p.bias = weights_.find(swiglu->gate_up_bias);
    p.epilogue = Epilogue::kGated;
    p.activation = activation_of(swiglu->activation);
    p.y = buffer(swiglu->out);
  } else if (const auto* head = std::get_if<LmHeadOp>(&op)) {
    if (!takes_codes(plan_.linears[static_cast<std::size_t>(index)])) p.x = head_input_.data();
    p.bias = weights_.find(head->bias);
    p.epilogue = Epilogue::kLogits;
    p.softcap = head->softcap;
    p.y = logits_.data();
    p.max_m = head_rows_;
  }
  return kernels_.add(p, plan_.linears[static_cast<std::size_t>(index)]);
}

void Program::bind_kv(const KvBlocks& kv) {
  for (std::size_t layer = 0; layer < plan_.kv.layers.size(); ++layer) {
    layers_.push_back(kv.layer(static_cast<int>(layer)));
  }
}

void Program::run_layers(const StepShape& shape, const StepView& step, const std::int32_t* fed,
                         const Stream& stream) const {
  const Stream first{stream.handle, false, stream.sm};
  bool is_normed = false;
  for (std::size_t i = 0; i < ops_.size(); ++i) {
    const BoundOp& bound = ops_[i];
    if (std::holds_alternative<LmHeadOp>(bound.op)) break;
    // Attention may read what came with the step before its predecessor has ended, so nothing of the step begins before
    // that is there.
    Run run{shape, step, fed, i == 0 ? first : stream};
    if (const LayerChains::Chain* chain = chains_.find(i, shape)) {
      chains_.launch(*chain, shape.rows, stream);
      i = chain->ops.end() - 1;
      run.fused_rope = rope_of_attention(i, shape);
      if (const auto* qkv = std::get_if<NormQkvRopeOp>(&ops_[i].op)) rotate(*qkv, run);
      continue;
    }
    const std::optional<RmsNormArgs> next_norm = fused_norm(i, shape.rows);
    if (next_norm) run.next_norm = &*next_norm;
    run.is_normed = is_normed;
    run.fused_rope = rope_of_attention(i, shape);
    run.codes = chains_.codes_after(i, shape);
    std::visit([&](const auto& op) { launch(op, bound.kernels, run); }, bound.op);
    is_normed = next_norm.has_value();
  }
}

void Program::run_head(const StepShape& shape, const StepView& step, std::int32_t* sampled_tokens,
                       const Stream& stream) const {
  if (shape.sampled == 0 || !plan_.is_last_stage()) return;
  head(step.sampled_rows, shape.sampled, stream);
  if (shape.late || logits() == nullptr) return;
  SamplingArgs args;
  args.logits = logits();
  args.vocab_size = plan_.vocab_size;
  args.num_rows = shape.sampled;
  args.params = step.sampling;
  args.tokens = sampled_tokens;
  args.workspace = sampling_workspace_.data();
  args.workspace_bytes = sampling_workspace_.size();
  if (shape.greedy) {
    sample_greedy(args, stream);
  } else {
    sample(args, stream);
  }
}

void Program::head(const std::int32_t* rows, int count, const Stream& stream) const {
  const BoundOp& bound = ops_.back();
  const auto& op = std::get<LmHeadOp>(bound.op);
  const Linear& linear = plan_.linears[static_cast<std::size_t>(op.linear)];
  if (takes_codes(linear)) {
    RmsNormArgs args{buffer(op.in), rows, weights_.find(op.norm), op.eps, count, linear.k};
    args.y_fp8 = codes_.data();
    args.y_scales = code_scales_.data();
    args.per_block = linear.matrix.format == MatrixFormat::kFp8Block;
    rms_norm(args, stream);
  } else {
    final_norm(rows, count, stream);
  }
  kernels_.launch(bound.kernels, count, stream);
  if (ranks_ != nullptr) ranks_->gather({logits_.data(), count, plan_.vocab_size / plan_.tp_size}, stream);
}

void Program::final_norm(const std::int32_t* rows, int count, const Stream& stream) const {
  const auto& op = std::get<LmHeadOp>(ops_.back().op);
  RmsNormArgs args{buffer(op.in), rows, weights_.find(op.norm), op.eps, count, plan_.hidden_size};
  args.y = head_input_.data();
  rms_norm(args, stream);
}

/// The norm after op `index`, where that is a sum over ranks that can take it along. Not in deterministic mode: which
/// sums can depends on the number of rows, and the norm's own sum has another order there.
std::optional<RmsNormArgs> Program::fused_norm(std::size_t index, int rows) const {
  const auto* sum = std::get_if<LinearResidualOp>(&ops_[index].op);
  if (deterministic_ || sum == nullptr || !sums_ranks(*sum) || !sum->post_norm.empty()) return std::nullopt;
  const auto args_of = [&](const auto& op, int linear) -> std::optional<RmsNormArgs> {
    if (op.in != sum->out || op.norm.empty()) return std::nullopt;
    const RmsNormArgs args = norm_args(buffer(op.in), op.norm, op.eps, linear, rows);
    const bool fits = args.width == plan_.linears[static_cast<std::size_t>(sum->linear)].n;
    return fits && ranks_->takes_norm(rows, args.width) ? std::optional(args) : std::nullopt;
  };
  if (index + 1 == ops_.size()) return std::nullopt;  // it leaves the stage
  const Op& next = ops_[index + 1].op;
  if (const auto* qkv = std::get_if<NormQkvRopeOp>(&next)) return args_of(*qkv, qkv->linear);
  if (const auto* swiglu = std::get_if<NormSwigluOp>(&next)) return args_of(*swiglu, swiglu->gate_up);
  return std::nullopt;
}

/// The op whose rotation and KV write attention does itself, where op `index` is one of these two: every row of the
/// step is a decode query, and nothing comes between them. Attention then reads older positions before its predecessor
/// has ended: the copy of the step's data divides them from the steps that wrote them.
const NormQkvRopeOp* Program::rope_of_attention(std::size_t index, const StepShape& shape) const {
  if (plan_.sm < 90 || shape.num_queries == 0 || shape.num_tiles > 0) return nullptr;
  if (std::holds_alternative<PagedAttentionOp>(ops_[index].op) && index > 0) --index;
  const auto* rope = std::get_if<NormQkvRopeOp>(&ops_[index].op);
  const auto* attention = rope == nullptr ? nullptr : std::get_if<PagedAttentionOp>(&ops_[index + 1].op);
  if (attention == nullptr || attention->layer != rope->layer || attention->in != rope->out) return nullptr;
  const KvType type = layers_[static_cast<std::size_t>(rope->layer)].type;
  const bool fuses =
      decode_prefers_fused(rope_args(*rope), type, shape.num_queries, shape.max_context, plan_.kv.tokens_per_block);
  return fuses ? rope : nullptr;
}

}  // namespace aotllm::cuda
