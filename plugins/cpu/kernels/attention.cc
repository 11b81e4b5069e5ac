#include "kernels/attention_codes.h"
#include "kernels/attention_float.h"
#include "kernels/attention_range.h"
#include "kernels/ops.h"

// Attention of some query vectors over the paged cache. A row's context is cut into ranges of positions
// (kv_range_length); in a range an online softmax goes over tiles of 64 tokens, and the row's result is the fold of its
// ranges in order. Ranges and tiles are aligned to absolute positions and the arithmetic of a vector is its own, so
// that its bits depend on nothing beside it: which vectors share the pass over K and V, and which thread takes a range,
// only changes the speed. Slots that a row does not see may hold anything, NaN included. Blocks without a slot that
// some row sees are not touched.

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

/// Where the result of vector `v` goes.
float* result_of(const AttentionArgs& args, int v) {
  return args.out + v / args.heads * args.row_stride + v % args.heads * args.head_dim;
}

template <class Cache>
void attend(const AttentionArgs& args) {
  RangeAttention<Cache> attention(args);
  RangeFold folds[kMaxVectors];
  for (int begin = args.range_of(args.first_seen(args.position)); begin <= args.last_position();
       begin = next_kv_range(begin, args.window)) {
    const Span vectors = attention.run(begin);
    for (int v = vectors.begin; v < vectors.end; ++v) {
      const int position = args.position + v / args.heads;
      float* out = result_of(args, v);
      folds[v].take(begin == args.range_of(args.first_seen(position)), attention.out(v), attention.top(v),
                    attention.sum(v), args.head_dim, out);
      if (position < next_kv_range(begin, args.window)) folds[v].finish(args.head_dim, out);
    }
  }
}

// A partial: the sums over values, padded to a multiple of 16, then top and sum.
template <class Cache>
void attend_range(const AttentionArgs& args, int begin, float* partials) {
  RangeAttention<Cache> attention(args);
  const Span vectors = attention.run(begin);
  const std::ptrdiff_t size = attention_partial_floats(args.head_dim);
  for (int v = vectors.begin; v < vectors.end; ++v) {
    float* to = partials + v * size;
    for (int d = 0; d < args.head_dim; d += kLanes) store(to + d, load(attention.out(v) + d));
    to[size - kLanes] = attention.top(v);
    to[size - kLanes + 1] = attention.sum(v);
  }
}

}  // namespace

void attention(const AttentionArgs& args) {
  switch (args.kv_type) {
    case KvType::kF32:
      return attend<FloatCache<KvType::kF32>>(args);
    case KvType::kBF16:
      return attend<FloatCache<KvType::kBF16>>(args);
    case KvType::kI16:
      return attend<CodeCache<KvType::kI16>>(args);
    case KvType::kI8:
      return attend<CodeCache<KvType::kI8>>(args);
  }
}

void attention_range(const AttentionArgs& args, int range, float* partials) {
  switch (args.kv_type) {
    case KvType::kF32:
      return attend_range<FloatCache<KvType::kF32>>(args, range, partials);
    case KvType::kBF16:
      return attend_range<FloatCache<KvType::kBF16>>(args, range, partials);
    case KvType::kI16:
      return attend_range<CodeCache<KvType::kI16>>(args, range, partials);
    case KvType::kI8:
      return attend_range<CodeCache<KvType::kI8>>(args, range, partials);
  }
}

void merge_attention(const AttentionArgs& args, const float* partials) {
  const int vectors = args.rows * args.heads;
  const std::ptrdiff_t size = attention_partial_floats(args.head_dim);
  const int first_range = args.range_of(args.first_seen(args.position));
  for (int v = 0; v < vectors; ++v) {
    const int position = args.position + v / args.heads;
    const int own_first = args.range_of(args.first_seen(position));
    float* out = result_of(args, v);
    RangeFold fold;
    const float* partial = partials + v * size;
    for (int begin = first_range; begin <= position; begin = next_kv_range(begin, args.window)) {
      if (begin >= own_first) {
        fold.take(begin == own_first, partial, partial[size - kLanes], partial[size - kLanes + 1], args.head_dim, out);
      }
      partial += vectors * size;
    }
    fold.finish(args.head_dim, out);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
