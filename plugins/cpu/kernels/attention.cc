#include "kernels/math.h"
#include "kernels/ops.h"

// Attention of one query token over the paged cache: an online softmax over tiles of 16 tokens, tiles aligned to
// absolute positions. Reduction order of one head, whatever the group or the other entries of a block:
//   score[t]   two chains over even and odd d, ascending, then their sum
//   tile max   tree over 16 lanes; running max and rescaling by e^(old - new) in ascending tiles
//   Σp         16 lane-wise sums over tiles, one tree at the end
//   Σp·v[d]    one chain over t, ascending
// Slots outside [first, position] may hold anything, NaN included: their scores are replaced, their V never read.

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

constexpr int kTile = kLanes;
constexpr int kMaxHeadDim = 512;

template <KvType Type>
struct Cache {
  static constexpr int kSize = Type == KvType::kF32 ? 4 : 2;
  static F32x16 get(const std::uint8_t* p) {
    if constexpr (Type == KvType::kF32) {
      return from_bits(load_i32(p));
    } else {
      return load_f16(p);
    }
  }
  static F32x16 get_8(const std::uint8_t* p) {
    if constexpr (Type == KvType::kF32) {
      return load_8(reinterpret_cast<const float*>(p));
    } else {
      return load_f16_8(p);
    }
  }
};

/// Running state of G heads.
template <int G>
struct State {
  float top[G];
  F32x16 sum[G];
  alignas(64) float p[G][kTile];
  alignas(64) float out[G][kMaxHeadDim];
};

/// Scaled, capped scores of one tile, `k` at its first token: [head_dim][tokens_per_block].
template <KvType Type, int G>
inline void tile_scores(const AttentionArgs& args, const float* q, const std::uint8_t* k, F32x16 (&scores)[G]) {
  const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(args.tokens_per_block) * Cache<Type>::kSize;
  F32x16 even[G], odd[G];
  for (int g = 0; g < G; ++g) even[g] = odd[g] = set1(0.0f);
  for (int d = 0; d < args.head_dim; d += 2) {
    const F32x16 k0 = Cache<Type>::get(k + d * stride);
    const F32x16 k1 = Cache<Type>::get(k + (d + 1) * stride);
    for (int g = 0; g < G; ++g) {
      even[g] = fma(set1(q[g * args.head_dim + d]), k0, even[g]);
      odd[g] = fma(set1(q[g * args.head_dim + d + 1]), k1, odd[g]);
    }
  }
  for (int g = 0; g < G; ++g) {
    scores[g] = mul(add(even[g], odd[g]), set1(args.scale));
    if (args.softcap > 0.0f) scores[g] = mul(set1(args.softcap), tanh(div(scores[g], set1(args.softcap))));
  }
}

/// Turns scores into unnormalized probabilities in `state.p`; tokens [begin, end) of the tile count.
template <int G>
inline void tile_softmax(int head_dim, int begin, int end, const F32x16 (&scores)[G], State<G>& state) {
  const Mask16 seen = lanes_between(begin, end);
  for (int g = 0; g < G; ++g) {
    const F32x16 s = select(seen, scores[g], set1(-__builtin_inff()));
    const float tile_top = reduce_max(s);
    if (tile_top > state.top[g]) {
      const F32x16 shrink = exp(set1(state.top[g] - tile_top));
      state.top[g] = tile_top;
      state.sum[g] = mul(state.sum[g], shrink);
      for (int d = 0; d < head_dim; d += kLanes) store(state.out[g] + d, mul(load(state.out[g] + d), shrink));
    }
    const F32x16 p = select(seen, exp(sub(s, set1(state.top[g]))), set1(0.0f));
    state.sum[g] = add(state.sum[g], p);
    store(state.p[g], p);
  }
}

/// out[g][d0 .. d0 + 16·C) += Σ_t p[g][t] · v[t][d], `v` at token 0 of the tile. Tail: 8 columns, C = 1.
template <KvType Type, int G, int C, bool Tail>
inline void add_values(int head_dim, const std::uint8_t* v, int begin, int end, int d0, State<G>& state) {
  F32x16 acc[G][C];
  for (int g = 0; g < G; ++g) {
    for (int c = 0; c < C; ++c) acc[g][c] = load(state.out[g] + d0 + c * kLanes);
  }
  for (int t = begin; t < end; ++t) {
    const std::uint8_t* row = v + (static_cast<std::ptrdiff_t>(t) * head_dim + d0) * Cache<Type>::kSize;
    for (int c = 0; c < C; ++c) {
      const F32x16 values = Tail ? Cache<Type>::get_8(row) : Cache<Type>::get(row + c * kLanes * Cache<Type>::kSize);
      for (int g = 0; g < G; ++g) acc[g][c] = fma(set1(state.p[g][t]), values, acc[g][c]);
    }
  }
  for (int g = 0; g < G; ++g) {
    for (int c = 0; c < C; ++c) store(state.out[g] + d0 + c * kLanes, acc[g][c]);
  }
}

template <KvType Type, int G>
void attend(const AttentionArgs& args, const float* q, float* out) {
  State<G> state;
  const int head_dim = args.head_dim;
  for (int g = 0; g < G; ++g) {
    state.top[g] = -__builtin_inff();
    state.sum[g] = set1(0.0f);
    for (int d = 0; d < head_dim; d += kLanes) store(state.out[g] + d, set1(0.0f));
  }
  const int first = args.window > 0 && args.position >= args.window ? args.position - args.window + 1 : 0;
  for (int tile = first / kTile * kTile; tile <= args.position; tile += kTile) {
    const int begin = tile < first ? first - tile : 0;
    const int end = args.position - tile + 1 < kTile ? args.position - tile + 1 : kTile;
    const int slot = tile % args.tokens_per_block;
    const std::ptrdiff_t block = args.block_stride * args.block_table[tile / args.tokens_per_block];
    const std::uint8_t* k = args.k_base + block + slot * Cache<Type>::kSize;
    const std::uint8_t* v = args.v_base + block + static_cast<std::ptrdiff_t>(slot) * head_dim * Cache<Type>::kSize;

    F32x16 scores[G];
    tile_scores<Type, G>(args, q, k, scores);
    tile_softmax<G>(head_dim, begin, end, scores, state);
    int d = 0;
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes)
      add_values<Type, G, 2, false>(head_dim, v, begin, end, d, state);
    for (; d + kLanes <= head_dim; d += kLanes) add_values<Type, G, 1, false>(head_dim, v, begin, end, d, state);
    if (d < head_dim) add_values<Type, G, 1, true>(head_dim, v, begin, end, d, state);
  }
  for (int g = 0; g < G; ++g) {
    const F32x16 total = set1(reduce_add(state.sum[g]));
    for (int d = 0; d < head_dim; d += kLanes) {
      store_lanes(out + g * head_dim + d, div(load(state.out[g] + d), total), head_dim - d);
    }
  }
}

template <KvType Type>
void attend_group(const AttentionArgs& args) {
  int g = 0;
  const auto q = [&] { return args.q + static_cast<std::ptrdiff_t>(g) * args.head_dim; };
  const auto out = [&] { return args.out + static_cast<std::ptrdiff_t>(g) * args.head_dim; };
  if constexpr (kMaxTileHeads == 4) {
    for (; g + 4 <= args.group; g += 4) attend<Type, 4>(args, q(), out());
  }
  for (; g + 2 <= args.group; g += 2) attend<Type, 2>(args, q(), out());
  if (g < args.group) attend<Type, 1>(args, q(), out());
}

}  // namespace

void attention(const AttentionArgs& args) {
  if (args.kv_type == KvType::kF32) {
    attend_group<KvType::kF32>(args);
  } else {
    attend_group<KvType::kF16>(args);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
