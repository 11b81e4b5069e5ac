#include <algorithm>

#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {

void run(const Worker& worker, const PagedAttentionOp& op) {
  const StepContext& step = worker.step;
  const Heads& heads = op.heads;
  const std::int64_t rows = step.batch.rows();
  const std::int64_t width = heads.q_width();

  // A few rows over few KV heads leave threads idle: then the query heads of a group are divided, too.
  const std::int64_t whole = rows * heads.num_kv_heads;
  const auto parts = static_cast<int>(std::clamp<std::int64_t>((worker.count + whole - 1) / whole, 1, heads.group()));

  const int kv_group = step.plan.kv.layers[op.layer].group;
  cpu::AttentionArgs args;
  args.head_dim = heads.head_dim;
  args.kv_type = step.plan.kv.dtype;
  args.block_stride = step.kv.block_stride(op.layer);
  args.tokens_per_block = step.plan.kv.tokens_per_block;
  args.window = op.window;
  args.scale = op.scale;
  args.softcap = op.softcap;

  // Dealt out in turn: neighbouring rows of a chunk have contexts of about the same length.
  for (std::int64_t item = worker.index; item < whole * parts; item += worker.count) {
    const auto row = static_cast<int>(item / parts % rows);
    const auto kv_head = static_cast<int>(item / parts / rows);
    const Range group = split(heads.group(), static_cast<int>(item % parts), parts);
    const std::int64_t at = row * width + (kv_head * heads.group() + group.begin) * heads.head_dim;
    args.q = step.space.buffer(op.in) + at;
    args.out = step.space.buffer(op.out) + at;
    args.group = static_cast<int>(group.end - group.begin);
    args.k_base = step.kv.k(op.layer, 0, kv_head);
    args.v_base = step.kv.v(op.layer, 0, kv_head);
    args.block_table = step.batch.block_table(row, kv_group);
    args.position = step.batch.position(row);
    step.kernels.attention(args);
  }
  worker.barrier();
}

}  // namespace aotllm
