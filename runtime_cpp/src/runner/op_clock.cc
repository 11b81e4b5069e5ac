#include "runner/op_clock.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <variant>

#include "runner/linear.h"

namespace aotllm {
namespace {

/// What an op is called, and the linears that it multiplies.
struct OpName {
  const char* op;
  std::vector<int> linears;
};

OpName name_of(const Op& op) {
  struct Namer {
    OpName operator()(const EmbeddingOp&) const { return {"embedding", {}}; }
    OpName operator()(const NormQkvRopeOp& o) const { return {"norm_qkv_rope", {o.linear}}; }
    OpName operator()(const PagedAttentionOp&) const { return {"paged_attention", {}}; }
    OpName operator()(const LinearResidualOp& o) const { return {"linear_residual", {o.linear}}; }
    OpName operator()(const NormSwigluOp& o) const { return {"norm_swiglu", {o.gate, o.up}}; }
    OpName operator()(const NormMoeOp& o) const { return {"norm_moe", {o.gate, o.up, o.down}}; }
    OpName operator()(const LmHeadOp& o) const { return {"lm_head", {o.linear}}; }
  };
  return std::visit(Namer{}, op);
}

std::int64_t bytes_of(const Linear& linear) {
  std::int64_t bytes = 0;
  for (const LinearSegment& segment : linear.segments) {
    const cpu::Segment& weights = segment.weights;
    bytes += static_cast<std::int64_t>(cpu::segment_bytes(weights.format, weights.n, weights.k));
  }
  return bytes;
}

OpProfile& entry(std::vector<OpProfile>& ops, const std::string& op, const std::string& shape) {
  const auto same = [&](const OpProfile& o) { return o.op == op && o.shape == shape; };
  const auto found = std::ranges::find_if(ops, same);
  if (found != ops.end()) return *found;
  OpProfile& added = ops.emplace_back();
  added.op = op;
  added.shape = shape;
  return added;
}

}  // namespace

void add_times(const Plan& plan, const std::vector<OpClock>& clocks, std::vector<OpProfile>& ops) {
  for (std::size_t i = 0; i < plan.ops.size(); ++i) {
    const OpName name = name_of(plan.ops[i]);
    std::string shape;
    std::int64_t bytes = 0;
    for (const int linear : name.linears) {
      shape += (shape.empty() ? "" : ", ") + shape_of(plan.linears[static_cast<std::size_t>(linear)]);
      bytes += bytes_of(plan.linears[static_cast<std::size_t>(linear)]);
    }
    OpProfile& profile = entry(ops, name.op, shape);
    ++profile.count;
    profile.bytes += bytes;
    for (const OpClock& clock : clocks) {
      const OpClock::Times& times = clock.times(i);
      const auto seconds = [&](StepPart part) {
        return 1e-9 * static_cast<double>(times[static_cast<std::size_t>(part)]);
      };
      profile.prepare_seconds += seconds(StepPart::kPrepare);
      profile.compute_seconds += seconds(StepPart::kCompute);
      profile.wait_seconds += seconds(StepPart::kWait);
    }
  }
}

}  // namespace aotllm
