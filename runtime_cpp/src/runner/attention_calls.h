#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/plan.h"
#include "kernels.h"
#include "runner/step_batch.h"

namespace aotllm {

/// Query vectors (rows · heads) of a call of attention whose ranges threads may share.
constexpr int max_shared_vectors(int head_dim) {
  return std::min(cpu::max_attention_vectors(head_dim), 16);
}

/// One call of the attention kernel: consecutive rows of one sequence, and query heads that share a KV head.
struct AttentionCall {
  int kv_head = 0;
  int row_begin = 0;
  int row_end = 0;
  int head_begin = 0;  ///< in the group of the KV head
  int head_end = 0;

  int vectors() const noexcept { return (row_end - row_begin) * (head_end - head_begin); }
};

/// The calls that make up one paged_attention: the same list on every thread. Rows are divided into as few calls as
/// keep `threads` busy, since each call reads K and V once.
class AttentionCalls {
 public:
  AttentionCalls(const StepBatch& batch, const PagedAttentionOp& op, int threads);

  /// Positions [begin, end) that some row of a call sees.
  struct Reach {
    int begin = 0;
    int end = 0;
  };
  Reach reach(const AttentionCall& call) const noexcept {
    const int position = batch_.position(call.row_begin);
    const bool is_cut = op_.window > 0 && position >= op_.window;
    return {is_cut ? position - op_.window + 1 : 0, batch_.position(call.row_end - 1) + 1};
  }

  /// What positions cost a call, in arbitrary units: once for K and V, and for each vector.
  static std::int64_t cost(const AttentionCall& call, Reach reach) noexcept {
    return std::int64_t{reach.end - reach.begin} * (kTokenCost + call.vectors());
  }
  /// Of all calls.
  std::int64_t cost() const noexcept { return cost_; }

  /// Calls visit(call) for each. KV heads come one after the other, so that sequences with common blocks find them in
  /// the CPU's caches.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (int kv_head = 0; kv_head < op_.heads.num_kv_heads; ++kv_head) for_each_of(kv_head, visit);
  }

 private:
  static constexpr int kTokenCost = 4;  ///< as that of so many vectors

  template <class Visit>
  void for_each_of(int kv_head, Visit&& visit) const {
    const int group = op_.heads.group();
    for (int row = 0; row < batch_.rows();) {
      const int end = std::min(row + rows_, batch_.sequence_end(row));
      for (int head = 0; head < group; head += heads_) {
        visit(AttentionCall{kv_head, row, end, head, std::min(head + heads_, group)});
      }
      row = end;
    }
  }
  /// Ranges of all calls.
  int ranges() const;

  const StepBatch& batch_;
  const PagedAttentionOp& op_;
  int rows_ = 1;   ///< the most of a call
  int heads_ = 1;  ///< likewise
  std::int64_t cost_ = 0;
};

}  // namespace aotllm
