#include <algorithm>

#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {
namespace {

/// Row `token` of the table, where this rank has it, to all ranks: the sum over ranks that each hold other tokens.
void look_up(const StepContext& step, const EmbeddingOp& op, TokenId token, std::int64_t row) {
  const Linear& linear = step.plan.linears[op.linear];
  const int held = token - op.vocab_begin;
  if (held < 0 || held >= linear.n) return;
  const LinearSegment* segment = linear.segments.data();
  while (held >= segment->row_begin + segment->weights.n) ++segment;
  float* own = step.space.buffer(op.out) + row * linear.k;
  step.kernels.dequantize_row(segment->weights, held - segment->row_begin, op.scale, own);
  for (const Workspace* space : step.spaces) {
    if (space != &step.space) std::copy_n(own, linear.k, space->buffer(op.out) + row * linear.k);
  }
}

}  // namespace

void run(const Worker& worker, const EmbeddingOp& op) {
  const StepContext& step = worker.step;
  const Range rows = split(step.batch.rows(), worker.index, worker.count);
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    look_up(step, op, step.batch.token(static_cast<int>(row)), row);
  }
  worker.meet();
}

}  // namespace aotllm
