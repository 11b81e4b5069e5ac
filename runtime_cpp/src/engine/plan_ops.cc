#include <string>

#include "engine/plan_reader.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr double kMaxFactor = 1e30;
constexpr std::int64_t kMaxExperts = 1024;

float eps(const JsonField& field) {
  return static_cast<float>(field.number(1e-30, 1.0));
}
float factor(const JsonField& field) {
  return static_cast<float>(field.number(-kMaxFactor, kMaxFactor));
}
float softcap(const JsonField& field) {
  return static_cast<float>(field.number(0.0, kMaxFactor));
}

/// Index of a linear whose columns are as wide as buffer `in`.
int linear_of(const PlanReader& reader, const JsonField& field, const Plan& plan, int in) {
  const int index = reader.linear(field);
  const Linear& linear = plan.linears[index];
  const Buffer& buffer = plan.buffers[in];
  if (linear.k != buffer.width) {
    field.fail(cat("a linear with k = ", buffer.width, ", the width of \"", buffer.name, '"'),
               cat('"', linear.name, "\" with k = ", linear.k));
  }
  return index;
}

void check_rows(const JsonField& field, const Linear& linear, std::int64_t n) {
  if (linear.n != n) field.fail(cat("a linear with n = ", n), cat('"', linear.name, "\" with n = ", linear.n));
}

/// Head counts of an op, equal to what the KV cache keeps for the layer.
Heads read_heads(const JsonField& op, const Plan& plan, int& layer_index) {
  const JsonField layer_field = op.at("layer");
  layer_index = static_cast<int>(layer_field.integer(plan.layer_begin, plan.layer_end - 1));
  const KvLayer& layer = plan.kv.layers[layer_index];

  Heads heads;
  heads.num_kv_heads = static_cast<int>(op.at("num_kv_heads").integer(layer.num_kv_heads, layer.num_kv_heads));
  heads.head_dim = static_cast<int>(op.at("head_dim").integer(layer.head_dim, layer.head_dim));
  const JsonField num_heads = op.at("num_heads");
  heads.num_heads = static_cast<int>(num_heads.integer(1, kMaxDimension / heads.head_dim));
  if (heads.num_heads % heads.num_kv_heads != 0) {
    num_heads.fail(cat("a multiple of num_kv_heads = ", heads.num_kv_heads));
  }
  return heads;
}

void check_format(const JsonField& field, const Linear& linear, MatrixFormat format) {
  if (linear.matrix.format != format) field.fail("a linear in bf16");
}

Op read_embedding(PlanReader& reader, const JsonField& op) {
  const Plan& plan = reader.plan();
  op.only({"op", "out", "linear", "scale", "vocab_begin"});
  EmbeddingOp e;
  e.out = reader.buffer(op.at("out"), plan.hidden_size);
  e.linear = linear_of(reader, op.at("linear"), plan, e.out);
  check_rows(op.at("linear"), plan.linears[e.linear], plan.vocab_rows());
  e.scale = factor(op.at("scale"));
  if (const auto begin = op.optional("vocab_begin")) {
    e.vocab_begin = static_cast<int>(begin->integer(plan.vocab_begin(), plan.vocab_begin()));
  } else if (plan.vocab_begin() != 0) {
    op.at("vocab_begin");
  }
  if (plan.target == Target::kCuda) check_format(op.at("linear"), plan.linears[e.linear], MatrixFormat::kBf16);
  return e;
}

Op read_norm_qkv_rope(PlanReader& reader, const JsonField& op) {
  op.only({"op", "layer", "in", "out", "eps", "norm", "linear", "bias", "q_norm", "k_norm", "num_heads", "num_kv_heads",
           "head_dim", "rope", "qk_norm_eps"});
  const Plan& plan = reader.plan();
  NormQkvRopeOp n;
  n.heads = read_heads(op, plan, n.layer);
  n.in = reader.buffer(op.at("in"));
  n.out = reader.buffer(op.at("out"), n.heads.q_width());
  n.eps = eps(op.at("eps"));
  n.norm = reader.vector(op.at("norm"), plan.buffers[n.in].width);
  n.linear = linear_of(reader, op.at("linear"), plan, n.in);
  const Linear& linear = plan.linears[n.linear];
  check_rows(op.at("linear"), linear, std::int64_t{n.heads.q_width()} + 2 * n.heads.kv_width());
  n.bias = reader.optional_vector(op, "bias", linear.n);
  n.q_norm = reader.optional_vector(op, "q_norm", n.heads.head_dim);
  n.k_norm = reader.optional_vector(op, "k_norm", n.heads.head_dim);
  const auto qk_norm_eps = op.optional("qk_norm_eps");
  n.qk_norm_eps = qk_norm_eps ? eps(*qk_norm_eps) : n.eps;

  const JsonField rope = op.at("rope");
  if (plan.rope.empty()) rope.fail("a table of plan.rope", "a plan without tables");
  n.rope = static_cast<int>(rope.integer(0, static_cast<std::int64_t>(plan.rope.size()) - 1));
  if (const auto half = plan.rope[n.rope].inv_freq.size(); 2 * half > static_cast<std::size_t>(n.heads.head_dim)) {
    rope.fail(cat("a table of at most ", n.heads.head_dim / 2, " frequencies"), cat(half));
  }
  return n;
}

Op read_paged_attention(PlanReader& reader, const JsonField& op) {
  op.only({"op", "layer", "in", "out", "num_heads", "num_kv_heads", "head_dim", "scale", "softcap", "window"});
  const Plan& plan = reader.plan();
  PagedAttentionOp a;
  a.heads = read_heads(op, plan, a.layer);
  a.in = reader.buffer(op.at("in"), a.heads.q_width());
  a.out = reader.buffer(op.at("out"), a.heads.q_width());
  a.scale = factor(op.at("scale"));
  a.softcap = softcap(op.at("softcap"));
  const int window = plan.kv.layers[a.layer].window;
  a.window = static_cast<int>(op.at("window").integer(window, window));
  return a;
}

Op read_linear_residual(PlanReader& reader, const JsonField& op) {
  const Plan& plan = reader.plan();
  op.only({"op", "in", "residual", "out", "linear", "bias", "post_norm", "eps", "all_reduce"});
  LinearResidualOp l;
  l.in = reader.buffer(op.at("in"));
  l.linear = linear_of(reader, op.at("linear"), plan, l.in);
  const int n = plan.linears[l.linear].n;
  l.residual = reader.buffer(op.at("residual"), n);
  l.out = reader.buffer(op.at("out"), n);
  l.bias = reader.optional_vector(op, "bias", n);
  l.post_norm = reader.optional_vector(op, "post_norm", n);
  if (!l.post_norm.empty()) l.eps = eps(op.at("eps"));
  if (const auto all_reduce = op.optional("all_reduce")) l.all_reduce = all_reduce->boolean();
  if (plan.tp_size > 1 && !l.all_reduce) op.at("all_reduce").fail(cat("true, as there are ", plan.tp_size, " ranks"));
  return l;
}

/// Gate and up are computed tile by tile side by side, so their panels must hold the same rows.
void check_panel_rows(const JsonField& field, const Linear& linear) {
  for (std::size_t i = 0; i + 1 < linear.segments.size(); ++i) {
    if (linear.segments[i].weights.n % cpu::kPanelRows != 0) {
      field.fail("segments of a multiple of 16 rows (but the last)", cat(linear.segments[i].weights.n, " rows"));
    }
  }
}

void read_gate_and_up(PlanReader& reader, const JsonField& op, NormSwigluOp& s) {
  const Plan& plan = reader.plan();
  const int n = plan.buffers[s.out].width;
  if (plan.target == Target::kCuda) {
    op.only({"op", "in", "out", "eps", "norm", "gate_up", "gate_up_bias", "activation"});
    s.gate_up = linear_of(reader, op.at("gate_up"), plan, s.in);
    if (n % 8 != 0) op.at("out").fail("a buffer whose width is a multiple of 8");
    check_rows(op.at("gate_up"), plan.linears[s.gate_up], std::int64_t{2} * n);
    s.gate_up_bias = reader.optional_vector(op, "gate_up_bias", std::int64_t{2} * n);
    return;
  }
  op.only({"op", "in", "out", "eps", "norm", "gate", "up", "gate_bias", "up_bias", "activation"});
  s.gate = linear_of(reader, op.at("gate"), plan, s.in);
  s.up = linear_of(reader, op.at("up"), plan, s.in);
  check_rows(op.at("gate"), plan.linears[s.gate], n);
  check_rows(op.at("up"), plan.linears[s.up], n);
  check_panel_rows(op.at("gate"), plan.linears[s.gate]);
  check_panel_rows(op.at("up"), plan.linears[s.up]);
  s.gate_bias = reader.optional_vector(op, "gate_bias", n);
  s.up_bias = reader.optional_vector(op, "up_bias", n);
}

cpu::Activation activation(const JsonField& field) {
  if (field.string() == "gelu_tanh") return cpu::Activation::kGeluTanh;
  if (field.string() != "silu") field.fail("silu or gelu_tanh");
  return cpu::Activation::kSilu;
}

Op read_norm_swiglu(PlanReader& reader, const JsonField& op) {
  const Plan& plan = reader.plan();
  NormSwigluOp s;
  s.in = reader.buffer(op.at("in"));
  s.out = reader.buffer(op.at("out"));
  s.eps = eps(op.at("eps"));
  s.norm = reader.vector(op.at("norm"), plan.buffers[s.in].width);
  read_gate_and_up(reader, op, s);
  s.activation = activation(op.at("activation"));
  return s;
}

/// Index of the linear of all experts' matrices, one under the other: `rows` of each, `k` columns.
int read_experts(const PlanReader& reader, const JsonField& field, const Plan& plan, int num_experts, std::int64_t rows,
                 std::int64_t k) {
  const int index = reader.linear(field);
  const Linear& linear = plan.linears[index];
  if (linear.k != k) field.fail(cat("a linear with k = ", k), cat('"', linear.name, "\" with k = ", linear.k));
  check_rows(field, linear, num_experts * rows);
  if (plan.target == Target::kCuda) return index;
  if (std::ssize(linear.segments) != num_experts) {
    field.fail(cat("a linear of ", num_experts, " segments, one per expert"),
               cat('"', linear.name, "\" of ", linear.segments.size()));
  }
  for (const LinearSegment& segment : linear.segments) {
    if (segment.weights.n != rows) field.fail(cat("segments of ", rows, " rows"), cat(segment.weights.n, " rows"));
  }
  return index;
}

/// Reads gate, up and down; the first tells how many neurons an expert has.
void read_experts(const PlanReader& reader, const JsonField& op, const Plan& plan, NormMoeOp& m) {
  const std::int64_t width = plan.buffers[m.in].width;
  const bool device = plan.target == Target::kCuda;
  const JsonField first = op.at(device ? "gate_up" : "gate");
  const int rows = plan.linears[reader.linear(first)].n;
  const int unit = m.num_experts * (device ? 2 : 1);
  if (rows % unit != 0) first.fail(cat("a linear whose n is a multiple of ", unit), cat("n = ", rows));
  m.neurons = rows / unit;
  if (device) {
    if (m.neurons % 8 != 0) first.fail("experts of a multiple of 8 neurons", cat(m.neurons));
    m.gate_up = read_experts(reader, first, plan, m.num_experts, std::int64_t{2} * m.neurons, width);
  } else {
    m.gate = read_experts(reader, first, plan, m.num_experts, m.neurons, width);
    m.up = read_experts(reader, op.at("up"), plan, m.num_experts, m.neurons, width);
  }
  m.down = read_experts(reader, op.at("down"), plan, m.num_experts, width, m.neurons);
}

Op read_norm_moe(PlanReader& reader, const JsonField& op) {
  const Plan& plan = reader.plan();
  if (plan.target == Target::kCuda) {
    op.only({"op", "in", "residual", "out", "eps", "norm", "router", "num_experts", "top_k", "normalize", "gate_up",
             "down", "activation", "all_reduce"});
  } else {
    op.only({"op", "in", "residual", "out", "eps", "norm", "router", "num_experts", "top_k", "normalize", "gate", "up",
             "down", "activation"});
  }
  NormMoeOp m;
  m.in = reader.buffer(op.at("in"));
  const int width = plan.buffers[m.in].width;
  m.residual = reader.buffer(op.at("residual"), width);
  m.out = reader.buffer(op.at("out"), width);
  m.eps = eps(op.at("eps"));
  m.norm = reader.vector(op.at("norm"), width);
  m.num_experts = static_cast<int>(op.at("num_experts").integer(1, kMaxExperts));
  m.top_k = static_cast<int>(op.at("top_k").integer(1, m.num_experts));
  m.normalize = op.at("normalize").boolean();
  m.router = reader.matrix(op.at("router"), m.num_experts, width);
  read_experts(reader, op, plan, m);
  m.activation = activation(op.at("activation"));
  if (const auto all_reduce = op.optional("all_reduce")) m.all_reduce = all_reduce->boolean();
  if (plan.tp_size > 1 && !m.all_reduce) op.at("all_reduce").fail(cat("true, as there are ", plan.tp_size, " ranks"));
  return m;
}

Op read_lm_head(PlanReader& reader, const JsonField& op) {
  op.only({"op", "in", "eps", "norm", "linear", "softcap", "vocab_size", "bias"});
  const Plan& plan = reader.plan();
  LmHeadOp h;
  h.in = reader.buffer(op.at("in"), plan.hidden_size);
  h.eps = eps(op.at("eps"));
  h.norm = reader.vector(op.at("norm"), plan.hidden_size);
  h.linear = linear_of(reader, op.at("linear"), plan, h.in);
  const int rows = plan.vocab_rows();
  op.at("vocab_size").integer(plan.vocab_size, plan.vocab_size);
  check_rows(op.at("linear"), plan.linears[h.linear], rows);
  h.softcap = softcap(op.at("softcap"));
  h.bias = reader.optional_vector(op, "bias", rows);
  return h;
}

}  // namespace

Op read_op(PlanReader& reader, const JsonField& field) {
  const JsonField name = field.at("op");
  const std::string& op = name.string();
  if (op == "embedding") return read_embedding(reader, field);
  if (op == "norm_qkv_rope") return read_norm_qkv_rope(reader, field);
  if (op == "paged_attention") return read_paged_attention(reader, field);
  if (op == "linear_residual") return read_linear_residual(reader, field);
  if (op == "norm_swiglu") return read_norm_swiglu(reader, field);
  if (op == "norm_moe") return read_norm_moe(reader, field);
  if (op == "lm_head") return read_lm_head(reader, field);
  name.fail("an op of this runtime");
}

}  // namespace aotllm
