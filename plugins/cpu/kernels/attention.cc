#include "kernels/attention_float.h"
#include "kernels/attention_int8.h"
#include "kernels/math.h"
#include "kernels/ops.h"

// Attention of one query token over the paged cache: an online softmax over tiles of 16 tokens, tiles aligned to
// absolute positions. Reduction order of one head, whatever the group or the other entries of a block:
//   tile max   tree over 16 lanes; running max and rescaling by e^(old - new) in ascending tiles
//   Σp         16 lane-wise sums over tiles, one tree at the end
// and for scores and values that of the cache (attention_float.h, attention_int8.h).
// Slots outside [first, position] may hold anything, NaN included: their scores are replaced, their V counts for
// nothing. Blocks without a slot inside are not touched.

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

constexpr int kTile = kLanes;

template <auto Value>
struct Constant {
  static constexpr auto value = Value;
};

/// Running state of G heads.
template <class Cache, int G>
struct State {
  float top[G];
  F32x16 sum[G];
  typename Cache::template Heads<G> heads;
  alignas(64) float out[G][kMaxHeadDim];
};

/// 16 tokens of a block, of which [begin, end) are seen.
struct Tile {
  const std::uint8_t* k;  ///< of the block
  const std::uint8_t* v;
  int slot;  ///< of the first token in the block
  int begin;
  int end;
};

/// Turns scores into unnormalized probabilities, which go to `state.heads`.
template <class Cache, int G>
inline void tile_softmax(const AttentionArgs& args, const Tile& tile, const F32x16 (&scores)[G],
                         State<Cache, G>& state) {
  const Mask16 seen = lanes_between(tile.begin, tile.end);
  for (int g = 0; g < G; ++g) {
    const F32x16 s = select(seen, scores[g], set1(-__builtin_inff()));
    const float tile_top = reduce_max(s);
    if (tile_top > state.top[g]) {
      const F32x16 shrink = exp(set1(state.top[g] - tile_top));
      state.top[g] = tile_top;
      state.sum[g] = mul(state.sum[g], shrink);
      for (int d = 0; d < args.head_dim; d += kLanes) store(state.out[g] + d, mul(load(state.out[g] + d), shrink));
    }
    const F32x16 p = select(seen, exp(sub(s, set1(state.top[g]))), set1(0.0f));
    state.sum[g] = add(state.sum[g], p);
    Cache::template weigh<G>(args, tile.v, tile.slot, seen, p, g, state.heads);
  }
}

template <class Cache, int G>
inline void run_tile(const AttentionArgs& args, const Tile& tile, State<Cache, G>& state) {
  F32x16 scores[G];
  Cache::template score<G>(args, state.heads, tile.k, tile.slot, scores);
  if (args.softcap > 0.0f) {
    for (int g = 0; g < G; ++g) scores[g] = mul(set1(args.softcap), tanh(div(scores[g], set1(args.softcap))));
  }
  tile_softmax<Cache, G>(args, tile, scores, state);
  const auto add_values = [&](auto columns, auto tail, int d) {
    Cache::template add_values<G, columns.value, tail.value>(args, state.heads, tile.v, tile.slot, tile.begin, tile.end,
                                                             d, state.out);
  };
  int d = 0;
  for (; d + 2 * kLanes <= args.head_dim; d += 2 * kLanes) add_values(Constant<2>{}, Constant<false>{}, d);
  for (; d + kLanes <= args.head_dim; d += kLanes) add_values(Constant<1>{}, Constant<false>{}, d);
  if (d < args.head_dim) add_values(Constant<1>{}, Constant<true>{}, d);
}

template <class Cache, int G>
void attend(const AttentionArgs& args, const float* q, float* out) {
  State<Cache, G> state;
  const int head_dim = args.head_dim;
  Cache::template begin<G>(args, q, state.heads);
  for (int g = 0; g < G; ++g) {
    state.top[g] = -__builtin_inff();
    state.sum[g] = set1(0.0f);
    for (int d = 0; d < head_dim; d += kLanes) store(state.out[g] + d, set1(0.0f));
  }
  const int first = args.window > 0 && args.position >= args.window ? args.position - args.window + 1 : 0;
  for (int at = first / kTile * kTile; at <= args.position; at += kTile) {
    const std::ptrdiff_t block = args.block_stride * args.block_table[at / args.tokens_per_block];
    const int begin = at < first ? first - at : 0;
    const int end = args.position - at + 1 < kTile ? args.position - at + 1 : kTile;
    run_tile<Cache, G>(args, {args.k_base + block, args.v_base + block, at % args.tokens_per_block, begin, end}, state);
  }
  for (int g = 0; g < G; ++g) {
    const F32x16 total = set1(reduce_add(state.sum[g]));
    for (int d = 0; d < head_dim; d += kLanes) {
      store_lanes(out + g * head_dim + d, div(load(state.out[g] + d), total), head_dim - d);
    }
  }
}

template <class Cache>
void attend_group(const AttentionArgs& args) {
  int g = 0;
  const auto q = [&] { return args.q + static_cast<std::ptrdiff_t>(g) * args.head_dim; };
  const auto out = [&] { return args.out + static_cast<std::ptrdiff_t>(g) * args.head_dim; };
  if constexpr (kMaxTileHeads == 4) {
    for (; g + 4 <= args.group; g += 4) attend<Cache, 4>(args, q(), out());
  }
  for (; g + 2 <= args.group; g += 2) attend<Cache, 2>(args, q(), out());
  if (g < args.group) attend<Cache, 1>(args, q(), out());
}

}  // namespace

void attention(const AttentionArgs& args) {
  switch (args.kv_type) {
    case KvType::kF32:
      return attend_group<FloatCache<KvType::kF32>>(args);
    case KvType::kF16:
      return attend_group<FloatCache<KvType::kF16>>(args);
    case KvType::kI8:
      return attend_group<Int8Cache>(args);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
