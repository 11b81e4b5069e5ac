#include "elementwise/elementwise.h"
#include "runner/cuda/program.h"

// How ops become launches.
namespace aotllm::cuda {

KvLayerView Program::kv_view(int layer, const Run& run) const {
  const auto index = static_cast<std::size_t>(layer);
  KvLayerView view = layers_[index];
  view.table_stride = run.shape.table_blocks;
  view.block_table = run.step.block_tables[static_cast<std::size_t>(plan_.kv.layers[index].group)];
  return view;
}

/// What a linear reads: `x` normalized (where there are weights of a norm), in the form that it takes.
void Program::norm(const Bf16* x, std::span<const float> weight, float eps, int index, const Run& run) const {
  if (!run.is_normed) rms_norm(norm_args(x, weight, eps, index, run.shape.rows), run.stream);
}

RmsNormArgs Program::norm_args(const Bf16* x, std::span<const float> weight, float eps, int index, int rows) const {
  const Linear& linear = plan_.linears[static_cast<std::size_t>(index)];
  RmsNormArgs args{x, nullptr, weights_.find(weight), eps, rows, linear.k};
  if (takes_codes(linear)) {
    args.y_fp8 = codes_.data();
    args.y_scales = code_scales_.data();
    args.per_block = linear.matrix.format == MatrixFormat::kFp8Block;
  } else {
    args.y = normed_.data();
  }
  return args;
}

void Program::launch(const EmbeddingOp& op, int /*kernels*/, const Run& run) const {
  const Linear& linear = plan_.linears[static_cast<std::size_t>(op.linear)];
  const void* table = weights_.find(static_cast<const void*>(linear.matrix.data.data()));
  const TokenRange held = ranks_ == nullptr ? TokenRange{} : TokenRange{op.vocab_begin, linear.n};
  embedding(run.step.tokens, run.shape.rows, static_cast<const Bf16*>(table), linear.k, op.scale, buffer(op.out),
            run.stream, held, run.fed);
  if (ranks_ == nullptr) return;
  AllReduceArgs sum;  // of one rank's row and zeros
  sum.partial = sum.out = buffer(op.out);
  sum.rows = run.shape.rows;
  sum.width = linear.k;
  ranks_->all_reduce(sum, run.stream);
}

void Program::launch(const NormQkvRopeOp& op, int kernels, const Run& run) const {
  norm(buffer(op.in), op.norm, op.eps, op.linear, run);
  kernels_.launch(kernels, run.shape.rows, run.stream);
  rotate(op, run);
}

/// What follows the product: RoPE and the KV write, unless attention does them.
void Program::rotate(const NormQkvRopeOp& op, const Run& run) const {
  if (run.fused_rope != nullptr) return;
  RopeKvArgs args = rope_args(op);
  args.m = run.shape.rows;
  args.positions = run.step.positions;
  args.sequences = run.step.sequences;
  args.kv = kv_view(op.layer, run);
  rope_kv(args, run.stream);
}

/// All of it but the step's own.
RopeKvArgs Program::rope_args(const NormQkvRopeOp& op) const {
  const RopeTable& table = plan_.rope[static_cast<std::size_t>(op.rope)];
  RopeKvArgs args;
  args.qkv = product_.data();
  args.q = buffer(op.out);
  args.num_heads = op.heads.num_heads;
  args.num_kv_heads = op.heads.num_kv_heads;
  args.head_dim = op.heads.head_dim;
  args.q_norm = weights_.find(op.q_norm);
  args.k_norm = weights_.find(op.k_norm);
  args.qk_norm_eps = op.qk_norm_eps;
  args.inv_freq = weights_.find(table.inv_freq);
  args.rotary_half = static_cast<int>(table.inv_freq.size());
  args.attention_factor = table.attention_factor;
  return args;
}

void Program::launch(const PagedAttentionOp& op, int /*kernels*/, const Run& run) const {
  AttentionArgs shared;
  shared.q = buffer(op.in);
  shared.out = buffer(op.out);
  shared.num_heads = op.heads.num_heads;
  shared.scale = op.scale;
  shared.softcap = op.softcap;
  shared.window = op.window;
  shared.kv = kv_view(op.layer, run);
  if (run.shape.num_queries > 0) {
    DecodeAttentionArgs args;
    static_cast<AttentionArgs&>(args) = shared;
    args.queries = run.step.queries;
    args.num_queries = run.shape.num_queries;
    args.max_context = run.shape.max_context;
    args.split_tokens =
        decode_split_tokens(args.num_queries, op.heads.num_kv_heads, args.max_context, plan_.kv.tokens_per_block);
    args.workspace = attention_workspace_.data();
    args.workspace_bytes = attention_workspace_.size();
    args.codes = run.codes;
    RopeKvArgs rope;
    if (run.fused_rope != nullptr) {
      rope = rope_args(*run.fused_rope);
      args.fused = &rope;
    }
    decode_attention(args, run.stream);
  }
  if (run.shape.num_tiles > 0) {
    ContextAttentionArgs args;
    static_cast<AttentionArgs&>(args) = shared;
    args.tiles = run.step.tiles;
    args.num_tiles = run.shape.num_tiles;
    args.m = run.shape.rows;
    context_attention(args, run.stream);
  }
}

void Program::launch(const LinearResidualOp& op, int kernels, const Run& run) const {
  if (takes_codes(plan_.linears[static_cast<std::size_t>(op.linear)])) norm(buffer(op.in), {}, 0.0f, op.linear, run);
  kernels_.launch(kernels, run.shape.rows, run.stream);
  if (sums_ranks(op)) {
    AllReduceArgs sum;
    sum.partial = product_.data();
    sum.bias = weights_.find(op.bias);
    sum.residual = op.post_norm.empty() ? buffer(op.residual) : nullptr;
    sum.out = op.post_norm.empty() ? buffer(op.out) : product_.data();
    sum.rows = run.shape.rows;
    sum.width = plan_.linears[static_cast<std::size_t>(op.linear)].n;
    sum.norm = run.next_norm;
    ranks_->all_reduce(sum, run.stream);
  }
  if (op.post_norm.empty()) return;
  RmsNormArgs args{product_.data(), nullptr,        weights_.find(op.post_norm),
                   op.eps,          run.shape.rows, plan_.linears[static_cast<std::size_t>(op.linear)].n};
  args.residual = buffer(op.residual);
  args.y = buffer(op.out);
  rms_norm(args, run.stream);
}

void Program::launch(const NormSwigluOp& op, int kernels, const Run& run) const {
  norm(buffer(op.in), op.norm, op.eps, op.gate_up, run);
  kernels_.launch(kernels, run.shape.rows, run.stream);
}

void Program::launch(const NormMoeOp& op, int kernels, const Run& run) const {
  RmsNormArgs normed = norm_args(buffer(op.in), op.norm, op.eps, op.gate_up, run.shape.rows);
  normed.y = normed_.data();
  rms_norm(normed, run.stream);
  const bool sums = op.all_reduce && ranks_ != nullptr;
  Mixtures::Launch launch{run.shape.rows, run.step.sequences, buffer(op.residual), buffer(op.out)};
  if (sums) launch.residual = nullptr, launch.out = product_.data();
  mixtures_.launch(kernels, launch, run.stream);
  if (!sums) return;
  AllReduceArgs sum;
  sum.partial = product_.data();
  sum.residual = buffer(op.residual);
  sum.out = buffer(op.out);
  sum.rows = run.shape.rows;
  sum.width = normed.width;
  ranks_->all_reduce(sum, run.stream);
}

void Program::launch(const LmHeadOp& /*op*/, int /*kernels*/, const Run& /*run*/) const {}

}  // namespace aotllm::cuda
