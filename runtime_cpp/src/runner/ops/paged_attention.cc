#include <algorithm>
#include <atomic>
#include <optional>

#include "runner/attention_calls.h"
#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {
namespace {

/// What a thread does of one call: all of it or, of one on the border of two shares, some ranges.
struct Share {
  AttentionCall call{};
  int first_range = 0;  ///< where the call's first range begins
  int ranges = 0;       ///< of the call; 0 where all of it is this thread's
  Range own{};          ///< of ranges, by their number
  int place = 0;        ///< of the call in the workspace
};

/// One op on one thread. Threads have equal shares of the cost of all calls in a row; a call on the border of two
/// shares is divided by the ranges of its context, and who ends it puts their results together.
class PagedAttention {
 public:
  PagedAttention(const Worker& worker, const PagedAttentionOp& op)
      : worker_(worker),
        step_(worker.step),
        op_(op),
        calls_(step_.batch, op, worker.count),
        cost_(split(calls_.cost(), worker.index, worker.count)),
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

  /// Each call is computed when the one after it is known.
  void run() {
    std::optional<Share> share;
    std::int64_t at = 0;
    calls_.for_each([&](const AttentionCall& call) {
      if (const std::optional<Share> next = share_of(call, at)) {
        if (share) compute(*share, &next->call);
        share = next;
      }
      at += AttentionCalls::cost(call, calls_.reach(call));
    });
    if (share) compute(*share, nullptr);
  }

 private:
  cpu::AttentionArgs args(const AttentionCall& call) const {
    cpu::AttentionArgs args = args_;
    const std::int64_t head = std::int64_t{call.kv_head} * op_.heads.group() + call.head_begin;
    const std::int64_t at = call.row_begin * std::int64_t{args.row_stride} + head * args.head_dim;
    args.q = step_.space.buffer(op_.in) + at;
    args.out = step_.space.buffer(op_.out) + at;
    args.rows = call.row_end - call.row_begin;
    args.heads = call.head_end - call.head_begin;
    args.k_base = step_.kv.k(op_.layer, 0, call.kv_head);
    args.v_base = step_.kv.v(op_.layer, 0, call.kv_head);
    args.block_table = step_.batch.block_table(call.row_begin, kv_group_);
    args.position = step_.batch.position(call.row_begin);
    return args;
  }

  /// The thread in whose share the middle of a cost [begin, end) lies.
  int owner(std::int64_t begin, std::int64_t end) const {
    int thread = 0;
    while ((begin + end) / 2 >= split(calls_.cost(), thread, worker_.count).end) ++thread;
    return thread;
  }

  /// This thread's share of a call whose cost begins at `at`, if any.
  std::optional<Share> share_of(const AttentionCall& call, std::int64_t at) const {
    const AttentionCalls::Reach reach = calls_.reach(call);
    const std::int64_t end = at + AttentionCalls::cost(call, reach);
    if (cost_.begin <= at && end <= cost_.end) return Share{call};
    if (at >= cost_.end || end <= cost_.begin) return std::nullopt;
    if (call.vectors() <= max_shared_vectors(args_.head_dim)) return ranges_of(call, reach, at);
    if (owner(at, end) == worker_.index) return Share{call};
    return std::nullopt;
  }

  /// This thread's ranges of a call whose cost, from `at` on, is in several shares.
  std::optional<Share> ranges_of(const AttentionCall& call, AttentionCalls::Reach reach, std::int64_t at) const {
    const auto next = [&](int begin) { return cpu::next_kv_range(begin, op_.window); };
    Share share{call, args_.range_of(reach.begin)};
    int last_owner = 0;
    for (int begin = share.first_range; begin < reach.end; begin = next(begin), ++share.ranges) {
      const AttentionCalls::Reach part{std::max(begin, reach.begin), std::min(next(begin), reach.end)};
      const std::int64_t end = at + AttentionCalls::cost(call, part);
      last_owner = owner(at, end);
      if (share.ranges == 0) share.place = last_owner;
      if (last_owner == worker_.index) {
        if (share.own.begin == share.own.end) share.own.begin = share.ranges;
        share.own.end = share.ranges + 1;
      }
      at = end;
    }
    if (share.own.begin == share.own.end) return std::nullopt;
    return share.place == last_owner ? Share{call} : share;
  }

  /// `next`: the call of which this thread has the next share.
  void compute(const Share& share, const AttentionCall* next) const {
    cpu::AttentionArgs now = args(share.call);
    cpu::AttentionArgs then;
    if (next != nullptr) {
      then = args(*next);
      now.next = &then;
    }
    if (share.ranges == 0) return step_.kernels.attention(now);

    const AttentionSpace& space = step_.space.attention();
    float* partials = space.partials + share.place * space.partial_floats;
    const std::int64_t size = share.call.vectors() * std::int64_t{cpu::attention_partial_floats(args_.head_dim)};
    int begin = share.first_range;
    for (std::int64_t range = 0; range < share.own.end; ++range) {
      if (range >= share.own.begin) step_.kernels.attention_range(now, begin, partials + range * size);
      begin = cpu::next_kv_range(begin, op_.window);
    }
    const std::atomic_ref<std::int32_t> done(space.done[share.place]);
    const auto count = static_cast<std::int32_t>(share.own.end - share.own.begin);
    if (done.fetch_add(count, std::memory_order_acq_rel) + count < share.ranges) return;
    step_.kernels.merge_attention(now, partials);
    done.store(0, std::memory_order_relaxed);  // the barrier at the end of the op publishes it
  }

  const Worker& worker_;
  const StepContext& step_;
  const PagedAttentionOp& op_;
  const AttentionCalls calls_;
  const Range cost_;  ///< of this thread
  const int kv_group_;
  cpu::AttentionArgs args_;  ///< what all calls have in common
};

}  // namespace

void run(const Worker& worker, const PagedAttentionOp& op) {
  PagedAttention(worker, op).run();
  worker.barrier();
}

}  // namespace aotllm
