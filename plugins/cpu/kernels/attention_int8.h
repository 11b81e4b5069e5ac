#pragma once

#include "kernels/math.h"
#include "kernels/ops.h"
#include "kernels/simd.h"

// The int8 cache, as attention.cc wants a cache. Its codes meet q and p as 16-bit codes, so that all products and sums
// over d (of scores) and over the 16 tokens of a tile (of values) are exact integers: 512 · 128 · 32767 < 2^31. The
// scale of a token's K multiplies its score, that of its V its probability. Order of reduction in floats:
//   Σp·v[d]    one chain over tiles, ascending
// Slots that are not seen may hold any codes and scales: their probability's code is 0, and 0 times a code is 0.

namespace aotllm::cpu::AOTLLM_ISA {

inline constexpr float kLargestCode16 = 32767.0f;

struct Int8Cache {
  /// What G heads bring along.
  template <int G>
  struct Heads {
    alignas(64) std::int16_t q[G][kMaxHeadDim];
    float q_scale[G];  ///< that of the scores included
    alignas(64) std::int16_t p[G][kLanes];
    float p_scale[G];
  };

  static const float* scales(const AttentionArgs& args, const std::uint8_t* half) {
    return reinterpret_cast<const float*>(half + std::ptrdiff_t{args.head_dim} * args.tokens_per_block);
  }

  template <int G>
  static void begin(const AttentionArgs& args, const float* q, Heads<G>& heads) {
    for (int g = 0; g < G; ++g, q += args.head_dim) {
      const float scale = largest_magnitude(q, args.head_dim) / kLargestCode16;
      for (int d = 0; d < args.head_dim; d += kLanes) {
        store_i16(heads.q[g] + d, to_codes(load_lanes(q + d, args.head_dim - d), scale, kLargestCode16));
      }
      heads.q_scale[g] = scale * args.scale;
    }
  }

  /// scale · q·k of the 16 tokens from `slot` on. `k`: of a block and KV head.
  template <int G>
  static void score(const AttentionArgs& args, const Heads<G>& heads, const std::uint8_t* k, int slot,
                    F32x16 (&scores)[G]) {
    const std::ptrdiff_t stride = std::ptrdiff_t{args.tokens_per_block} * 2;
    const std::uint8_t* codes = k + slot * 2;
    constexpr int kChains = G < kMaxTileHeads ? 2 : 1;  // few heads leave add_dot waiting for itself
    I32x16 sums[G][kChains];
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < kChains; ++c) sums[g][c] = set1_i32(0);
    }
    for (int d = 0; d < args.head_dim; d += 2 * kChains) {
      for (int c = 0; c < kChains; ++c, codes += stride) {
        const I16x32 pairs = load_pairs(codes);
        for (int g = 0; g < G; ++g) sums[g][c] = add_dot(sums[g][c], pairs, broadcast_pair(heads.q[g] + d + 2 * c));
      }
    }
    const F32x16 k_scales = load(scales(args, k) + slot);
    for (int g = 0; g < G; ++g) {
      const I32x16 sum = kChains == 2 ? add(sums[g][0], sums[g][kChains - 1]) : sums[g][0];
      scores[g] = mul(to_f32(sum), mul(k_scales, set1(heads.q_scale[g])));
    }
  }

  /// Takes the probabilities of head `g`; lanes that are not in `seen` are 0.
  template <int G>
  static void weigh(const AttentionArgs& args, const std::uint8_t* v, int slot, Mask16 seen, F32x16 p, int g,
                    Heads<G>& heads) {
    const F32x16 weights = select(seen, mul(p, load(scales(args, v) + slot)), set1(0.0f));
    const float scale = largest_magnitude(weights) / kLargestCode16;
    heads.p_scale[g] = scale;
    store_i16(heads.p[g], to_codes(weights, scale, kLargestCode16));
  }

  /// out[g][d0 .. d0 + 16·C) += Σ p[g][t] · v[slot + t][d] over the tile. Tail: 8 columns, C = 1.
  template <int G, int C, bool Tail>
  static void add_values(const AttentionArgs& args, const Heads<G>& heads, const std::uint8_t* v, int slot, int, int,
                         int d0, float (*out)[kMaxHeadDim]) {
    const std::ptrdiff_t stride = std::ptrdiff_t{args.head_dim} * 2;
    const std::uint8_t* codes = v + slot / 2 * stride + d0 * 2;
    I32x16 sums[G][C];
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < C; ++c) sums[g][c] = set1_i32(0);
    }
    for (int t = 0; t < kLanes; t += 2, codes += stride) {
      for (int c = 0; c < C; ++c) {
        const I16x32 pairs = Tail ? load_pairs_8(codes) : load_pairs(codes + c * kLanes * 2);
        for (int g = 0; g < G; ++g) sums[g][c] = add_dot(sums[g][c], pairs, broadcast_pair(heads.p[g] + t));
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < C; ++c) {
        float* to = out[g] + d0 + c * kLanes;
        store(to, fma(to_f32(sums[g][c]), set1(heads.p_scale[g]), load(to)));
      }
    }
  }
};

}  // namespace aotllm::cpu::AOTLLM_ISA
