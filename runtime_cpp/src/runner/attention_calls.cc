#include "runner/attention_calls.h"

namespace aotllm {
namespace {

int divide_up(int a, int b) {
  return (a + b - 1) / b;
}

}  // namespace

AttentionCalls::AttentionCalls(const StepBatch& batch, const PagedAttentionOp& op, int threads)
    : batch_(batch), op_(op) {
  const int head_dim = op.heads.head_dim;
  const int most = cpu::max_attention_vectors(head_dim);
  const int group = op.heads.group();
  const int parts = divide_up(group, most);
  heads_ = divide_up(group, parts);
  // Some calls for each thread; but what threads can share by ranges may stay in one.
  const int wanted = static_cast<int>(std::int64_t{batch.rows()} * op.heads.num_kv_heads * parts / (4 * threads));
  rows_ = std::clamp(wanted, std::max(1, max_shared_vectors(head_dim) / heads_), std::max(1, most / heads_));
  if (batch.rows() * op.heads.num_kv_heads * parts < threads) {
    // So few rows over so few KV heads may leave threads idle: then the heads of a group are divided, too.
    heads_ = divide_up(heads_, std::min(heads_, divide_up(threads, ranges())));
  }
  for_each_of(0, [&](const AttentionCall& call) { cost_ += cost(call, reach(call)); });
  cost_ *= op.heads.num_kv_heads;
}

int AttentionCalls::ranges() const {
  int count = 0;
  for_each([&](const AttentionCall& call) {
    const Reach seen = reach(call);
    for (int at = seen.begin - seen.begin % cpu::kv_range_length(seen.begin, op_.window); at < seen.end;
         at = cpu::next_kv_range(at, op_.window)) {
      ++count;
    }
  });
  return count;
}

}  // namespace aotllm
