#pragma once

#include "kernels/ops.h"
#include "kernels/simd.h"

// The float caches, as attention.cc wants a cache: K and V are widened as they are read. Order of reduction:
//   score[t]   two chains over even and odd d, ascending, then their sum
//   Σp·v[d]    one chain over t, ascending
// V of slots that are not seen is never read.

namespace aotllm::cpu::AOTLLM_ISA {

template <KvType Type>
struct FloatCache {
  static constexpr std::ptrdiff_t kSize = Type == KvType::kF32 ? 4 : 2;

  /// What G heads bring along.
  template <int G>
  struct Heads {
    const float* q;  ///< [G, head_dim]
    alignas(64) float p[G][kLanes];
  };

  static F32x16 get(const std::uint8_t* p) {
    if constexpr (Type == KvType::kF32) {
      return load(reinterpret_cast<const float*>(p));
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

  template <int G>
  static void begin(const AttentionArgs&, const float* q, Heads<G>& heads) {
    heads.q = q;
  }

  /// scale · q·k of the 16 tokens from `slot` on. `k`: of a block and KV head.
  template <int G>
  static void score(const AttentionArgs& args, const Heads<G>& heads, const std::uint8_t* k, int slot,
                    F32x16 (&scores)[G]) {
    const std::ptrdiff_t stride = args.tokens_per_block * kSize;
    k += slot * kSize;
    F32x16 even[G], odd[G];
    for (int g = 0; g < G; ++g) even[g] = odd[g] = set1(0.0f);
    for (int d = 0; d < args.head_dim; d += 2) {
      const F32x16 k0 = get(k + d * stride);
      const F32x16 k1 = get(k + (d + 1) * stride);
      for (int g = 0; g < G; ++g) {
        even[g] = fma(set1(heads.q[g * args.head_dim + d]), k0, even[g]);
        odd[g] = fma(set1(heads.q[g * args.head_dim + d + 1]), k1, odd[g]);
      }
    }
    for (int g = 0; g < G; ++g) scores[g] = mul(add(even[g], odd[g]), set1(args.scale));
  }

  /// Takes the probabilities of head `g`; lanes that are not in `seen` are 0.
  template <int G>
  static void weigh(const AttentionArgs&, const std::uint8_t*, int, Mask16, F32x16 p, int g, Heads<G>& heads) {
    store(heads.p[g], p);
  }

  /// out[g][d0 .. d0 + 16·C) += Σ p[g][t] · v[slot + t][d] over t in [begin, end). Tail: 8 columns, C = 1.
  template <int G, int C, bool Tail>
  static void add_values(const AttentionArgs& args, const Heads<G>& heads, const std::uint8_t* v, int slot, int begin,
                         int end, int d0, float (*out)[kMaxHeadDim]) {
    F32x16 acc[G][C];
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < C; ++c) acc[g][c] = load(out[g] + d0 + c * kLanes);
    }
    for (int t = begin; t < end; ++t) {
      const std::uint8_t* row = v + (std::ptrdiff_t{slot + t} * args.head_dim + d0) * kSize;
      for (int c = 0; c < C; ++c) {
        const F32x16 values = Tail ? get_8(row) : get(row + c * kLanes * kSize);
        for (int g = 0; g < G; ++g) acc[g][c] = fma(set1(heads.p[g][t]), values, acc[g][c]);
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < C; ++c) store(out[g] + d0 + c * kLanes, acc[g][c]);
    }
  }
};

}  // namespace aotllm::cpu::AOTLLM_ISA
