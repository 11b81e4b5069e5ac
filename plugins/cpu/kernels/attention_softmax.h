#pragma once

#include "kernels/attention_tile.h"
#include "kernels/math.h"

// The online softmax of attention, to base 2: scores come with log2(e) in their scale.

namespace aotllm::cpu::AOTLLM_ISA {

inline constexpr float kLog2E = 0x1.715476p+0f;

/// 2^x for x ≤ 127, to a relative error of 2e-7; 2^-64 for all that is less: next to the largest exponential, whose
/// exponent is about 0, that is nothing. NaN stays NaN.
inline F32x16 exp2_below(F32x16 x) {
  const F32x16 y = max(set1(-64.0f), x);
  const F32x16 n = round_even(y);
  const F32x16 r = sub(y, n);
  // The polynomial of degree 5 with 1 at 0 that is closest to 2^r in [-0.5, 0.5] by relative error, 9.2e-8.
  F32x16 p = set1(0x1.5bba14p-10f);
  p = fma(p, r, set1(0x1.3cea88p-7f));
  p = fma(p, r, set1(0x1.c6b752p-5f));
  p = fma(p, r, set1(0x1.ebf9bcp-3f));
  p = fma(p, r, set1(0x1.62e42ap-1f));
  p = fma(p, r, set1(1.0f));
  return from_bits(add(bits(p), shift_left<23>(to_i32(n))));
}

/// A vector's reference moves when a score has left it this far behind: exponentials stay below 2^8, and sums are
/// rescaled a few times in a context, not at each new maximum.
inline constexpr float kTopSlack = 8.0f;

/// Moves the reference of vector `v` to `top`.
template <class Element>
inline void raise_top(float top, int v, Vectors<Element>& vectors) {
  const F32x16 shrink = exp2_below(set1(vectors.top[v] - top));
  vectors.top[v] = top;
  store(vectors.sum[v], mul(load(vectors.sum[v]), shrink));
  float* out = vectors.out + static_cast<std::ptrdiff_t>(v) * vectors.stride;
  for (int d = 0; d < vectors.stride; d += kLanes) store(out + d, mul(load(out + d), shrink));
}

/// By lanes of parts.
template <bool Whole>
inline F32x16 largest_score(const float* scores, const Seen& seen) {
  const F32x16 least = set1(-__builtin_inff());
  F32x16 x[kTileParts];
  for (int part = 0; part < kTileParts; ++part) x[part] = seen.only<Whole>(part, load(scores + part * kLanes), least);
  return max(max(x[0], x[1]), max(x[2], x[3]));
}

/// Raises the references of G vectors from `v` on to the largest of their scores, where it is time.
template <int G, class Element>
inline void take_scores(const float (*scores)[kTileTokens], const Seen* seen, int v, Vectors<Element>& vectors) {
  F32x16 largest[round_up_to_4(G)];
  for (int g = 0; g < G; ++g) {
    largest[g] = seen[g].is_whole ? largest_score<true>(scores[g], seen[g]) : largest_score<false>(scores[g], seen[g]);
  }
  for (int g = G; g < round_up_to_4(G); ++g) largest[g] = largest[0];
  alignas(64) float tops[round_up_to_4(G)];
  for (int g = 0; g < G; g += 4) reduce_max_4(largest + g, tops + g);
  for (int g = 0; g < G; ++g) {
    const float top = tops[g] * vectors.scale[v + g];
    if (top > vectors.top[v + g] + kTopSlack) raise_top(top, v + g, vectors);
  }
}

/// The exponentials of a tile's scores for vector `v`, 0 for unseen ones; adds them to its sum. The order is that of
/// lanes of parts, ((0 + 1) + (2 + 3)) to the sum before.
template <bool Whole, class Element>
inline void take_exponentials(const float* scores, const Seen& seen, int v, Vectors<Element>& vectors,
                              F32x16 (&p)[kTileParts]) {
  const F32x16 top = set1(-vectors.top[v]);
  const F32x16 scale = set1(vectors.scale[v]);
  for (int part = 0; part < kTileParts; ++part) {
    p[part] = seen.only<Whole>(part, exp2_below(fma(load(scores + part * kLanes), scale, top)), set1(0.0f));
  }
  store(vectors.sum[v], add(load(vectors.sum[v]), add(add(p[0], p[1]), add(p[2], p[3]))));
}

}  // namespace aotllm::cpu::AOTLLM_ISA
