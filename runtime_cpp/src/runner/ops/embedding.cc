#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {

void run(const Worker& worker, const EmbeddingOp& op) {
  const StepContext& step = worker.step;
  const Linear& linear = step.plan.linears[op.linear];
  float* out = step.space.buffer(op.out);
  const Range rows = split(step.batch.rows(), worker.index, worker.count);
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    const TokenId token = step.batch.token(static_cast<int>(row));
    const LinearSegment* segment = linear.segments.data();
    while (token >= segment->row_begin + segment->weights.n) ++segment;
    step.kernels.dequantize_row(segment->weights, token - segment->row_begin, op.scale, out + row * linear.k);
  }
  worker.barrier();
}

}  // namespace aotllm
