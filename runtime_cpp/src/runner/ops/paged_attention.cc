#include <algorithm>
#include <atomic>

#include "runner/attention_calls.h"
#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {
namespace {

/// One op on one thread. Threads have equal shares of the cost of all calls in a row; a call on the border of two
/// shares is divided by the ranges of its context, and who ends it puts their results together.
class PagedAttention {
 public:
  PagedAttention(const Worker& worker, const PagedAttentionOp& op)
      : worker_(worker),
        step_(worker.step),
        op_(op),
        calls_(step_.batch, op, worker.count),
        share_(split(calls_.cost(), worker.index, worker.count)),
        kv_group_(step_.plan.kv.layers[op.layer].group) {
    args_.row_stride = op.heads.q_width();
    args_.head_dim = op.heads.head_dim;
    args_.kv_type = step_.plan.kv.dtype;
    args_.block_stride = step_.kv.block_stride(op.layer);
    args_.tokens_per_block = step_.plan.kv.tokens_per_block;
    args_.window = op.window;
    args_.scale = op.scale;
    args_.softcap = op.softcap;
  }

  void run() {
    std::int64_t at = 0;
    calls_.for_each([&](const AttentionCall& call) {
      const std::int64_t end = at + AttentionCalls::cost(call, calls_.reach(call));
      if (share_.begin <= at && end <= share_.end) {
        step_.kernels.attention(args(call));
      } else if (at < share_.end && end > share_.begin) {
        run_on_border(call, at);
      }
      at = end;
    });
  }

 private:
  const cpu::AttentionArgs& args(const AttentionCall& call) {
    const std::int64_t head = std::int64_t{call.kv_head} * op_.heads.group() + call.head_begin;
    const std::int64_t at = call.row_begin * std::int64_t{args_.row_stride} + head * args_.head_dim;
    args_.q = step_.space.buffer(op_.in) + at;
    args_.out = step_.space.buffer(op_.out) + at;
    args_.rows = call.row_end - call.row_begin;
    args_.heads = call.head_end - call.head_begin;
    args_.k_base = step_.kv.k(op_.layer, 0, call.kv_head);
    args_.v_base = step_.kv.v(op_.layer, 0, call.kv_head);
    args_.block_table = step_.batch.block_table(call.row_begin, kv_group_);
    args_.position = step_.batch.position(call.row_begin);
    return args_;
  }

  /// The thread in whose share the middle of a cost [begin, end) lies.
  int owner(std::int64_t begin, std::int64_t end) const {
    int thread = 0;
    while ((begin + end) / 2 >= split(calls_.cost(), thread, worker_.count).end) ++thread;
    return thread;
  }

  /// A call whose cost, from `at` on, is in several shares.
  void run_on_border(const AttentionCall& call, std::int64_t at) {
    const AttentionCalls::Reach reach = calls_.reach(call);
    if (call.vectors() > max_shared_vectors(args_.head_dim)) {
      if (owner(at, at + AttentionCalls::cost(call, reach)) == worker_.index) step_.kernels.attention(args(call));
      return;
    }
    args(call);
    const int first_range = args_.range_of(reach.begin);
    int ranges = 0;
    int first_owner = 0;
    int last_owner = 0;
    Range own;  // of ranges, by their number
    for (int begin = first_range; begin < reach.end; begin = cpu::next_kv_range(begin, op_.window), ++ranges) {
      const AttentionCalls::Reach part{std::max(begin, reach.begin),
                                       std::min(cpu::next_kv_range(begin, op_.window), reach.end)};
      const std::int64_t end = at + AttentionCalls::cost(call, part);
      last_owner = owner(at, end);
      if (ranges == 0) first_owner = last_owner;
      if (last_owner == worker_.index) {
        if (own.begin == own.end) own.begin = ranges;
        own.end = ranges + 1;
      }
      at = end;
    }
    if (own.begin == own.end) return;
    if (first_owner == last_owner) return step_.kernels.attention(args_);
    run_ranges(call, first_range, ranges, own, first_owner);
  }

  /// This thread's ranges `own` of the `ranges` of a call. `place`: of the call in the workspace.
  void run_ranges(const AttentionCall& call, int first_range, int ranges, Range own, int place) {
    const AttentionSpace& space = step_.space.attention();
    float* partials = space.partials + place * space.partial_floats;
    const std::int64_t size = call.vectors() * std::int64_t{cpu::attention_partial_floats(args_.head_dim)};
    int begin = first_range;
    for (std::int64_t range = 0; range < own.end; ++range) {
      if (range >= own.begin) step_.kernels.attention_range(args_, begin, partials + range * size);
      begin = cpu::next_kv_range(begin, op_.window);
    }
    const std::atomic_ref<std::int32_t> done(space.done[place]);
    const auto count = static_cast<std::int32_t>(own.end - own.begin);
    if (done.fetch_add(count, std::memory_order_acq_rel) + count < ranges) return;
    step_.kernels.merge_attention(args_, partials);
    done.store(0, std::memory_order_relaxed);  // the barrier at the end of the op publishes it
  }

  const Worker& worker_;
  const StepContext& step_;
  const PagedAttentionOp& op_;
  const AttentionCalls calls_;
  const Range share_;
  const int kv_group_;
  cpu::AttentionArgs args_;
};

}  // namespace

void run(const Worker& worker, const PagedAttentionOp& op) {
  PagedAttention(worker, op).run();
  worker.barrier();
}

}  // namespace aotllm
