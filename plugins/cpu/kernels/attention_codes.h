#pragma once

#include "kernels/attention_softmax.h"
#include "kernels/attention_tile.h"
#include "kernels/head_codes.h"

// The caches of 16- and 8-bit codes, as attention.cc wants a cache. Codes meet those of q and of the probabilities, so
// that all sums of products, over d for scores and over the tokens of a tile for values, are exact integers of 32 bits:
//   Σ q · k  at most ‖q‖ · ‖k‖, and head_codes.h bounds the norms of codes
//   Σ p · v  at most Σp · max |v|, for 16 bits (131,000 + 64 / 2) · 16,383, for 8 bits 64 · 32,767 · 127
// The scale of a token's K multiplies its score, that of its V its probability. Order of reduction in floats:
//   Σ p        lanes of parts, ((0 + 1) + (2 + 3)), then the tree
//   Σ p · v    one chain over tiles, ascending
// Slots that are not seen may hold any codes and scales: their weight is 0, and 0 times a code is 0.

namespace aotllm::cpu::AOTLLM_ISA {

template <KvType Type>
struct CodeCache {
  using Element = std::int16_t;
  /// Vectors of a batch may be of several rows.
  static constexpr bool kMixesRows = true;
  static constexpr int kMaxBatch = kMaxBatchVectors;

  static constexpr std::ptrdiff_t kBytes = Type == KvType::kI16 ? 2 : 1;

  /// The pairs of codes of 16 lanes.
  static I16x32 pairs(const std::uint8_t* p) {
    if constexpr (Type == KvType::kI16) {
      return load_wide_pairs(p);
    } else {
      return load_pairs(p);
    }
  }

  /// Scales of the tokens of a part, of which `half` is K or V.
  static const float* scales(const AttentionArgs& args, const std::uint8_t* half, int slot) {
    return reinterpret_cast<const float*>(half + std::ptrdiff_t{args.head_dim} * args.tokens_per_block * kBytes) + slot;
  }
  static const float* k_scales(const AttentionArgs& args, const Part& part) { return scales(args, part.k, part.slot); }
  static const float* v_scales(const AttentionArgs& args, const Part& part) { return scales(args, part.v, part.slot); }

  /// The first pairs of K.
  static const std::uint8_t* pairs_of(const Part& part) { return part.k + part.slot * 2 * kBytes; }

  /// Takes vector `v` of the call, [head_dim]. `scale`: of its scores.
  static void take_query(const AttentionArgs& args, const float* q, float scale, int v, Vectors<Element>& vectors) {
    Element* codes = vectors.q + static_cast<std::ptrdiff_t>(v) * vectors.stride;
    const float q_scale = head_scale(q, args.head_dim);
    const F32x16 inverse = set1(q_scale == 0.0f ? 0.0f : 1.0f / q_scale);
    for (int d = 0; d < args.head_dim; d += kLanes) {
      store_i16(codes + d, to_i32(mul(load_lanes(q + d, args.head_dim - d), inverse)));
    }
    vectors.scale[v] = q_scale * scale;
  }

  /// Scores of G vectors and S parts from `part` on, but for their scale: scores[g][part · 16 …].
  template <int G, int S>
  static void score(const AttentionArgs& args, const Element* q, std::ptrdiff_t q_stride, const Tile& tile, int part,
                    float (*scores)[kTileTokens]) {
    const std::ptrdiff_t line = std::ptrdiff_t{args.tokens_per_block} * 2 * kBytes;
    const std::uint8_t* k[S];
    const std::uint8_t* ahead[S];
    I32x16 sums[G][S];
    for (int s = 0; s < S; ++s) {
      k[s] = pairs_of(tile.parts[part + s]);
      ahead[s] = pairs_of(tile.ahead[part + s]);
      for (int g = 0; g < G; ++g) sums[g][s] = set1_i32(0);
    }
    for (int d = 0; d < args.head_dim; d += 2) {
      I16x32 codes[S];
      for (int s = 0; s < S; ++s) {
        codes[s] = pairs(k[s]);
        prefetch(ahead[s]);
        k[s] += line;
        ahead[s] += line;
      }
      for (int g = 0; g < G; ++g) {
        const I16x32 pair = broadcast_pair(q + g * q_stride + d);
        for (int s = 0; s < S; ++s) sums[g][s] = add_dot(sums[g][s], codes[s], pair);
      }
    }
    for (int s = 0; s < S; ++s) {
      const F32x16 scale = load(k_scales(args, tile.parts[part + s]));
      prefetch(k_scales(args, tile.ahead[part + s]));
      prefetch(v_scales(args, tile.ahead[part + s]));
      for (int g = 0; g < G; ++g) store(scores[g] + (part + s) * kLanes, mul(to_f32(sums[g][s]), scale));
    }
  }

  /// The most that codes of weights may sum up to.
  static constexpr float kLargestSum = Type == KvType::kI16 ? 131000.0f : kTileTokens * kLargestCode16;

  /// Scales of weights whose largest and whose sums are given, weight = scale · code: no code is above 32767 and their
  /// sum is such that sums of products stay below 2^31. The inverse is finite; a NaN goes on, as all sums have it.
  static void scale_weights(const float* largest, const float* sum, float* scale, float* inverse) {
    const F32x16 by_largest = mul(load(largest), set1(1.0f / kLargestCode16));
    const F32x16 by_sum = mul(load(sum), set1(1.0f / kLargestSum));
    const F32x16 scales = max(set1(1e-34f), max(by_largest, by_sum));
    store(scale, scales);
    store(inverse, div(set1(1.0f), scales));
  }

  /// Turns the scores of vector `v` into weights of tokens in floats; `largest` and `sum` of them by lanes of parts.
  template <bool Whole>
  static void take_weights(const AttentionArgs& args, float* scores, const Seen& seen, const Tile& tile, int v,
                           Vectors<Element>& vectors, F32x16& largest, F32x16& sum) {
    F32x16 w[kTileParts];
    take_exponentials<Whole>(scores, seen, v, vectors, w);
    for (int part = 0; part < kTileParts; ++part) {
      const F32x16 scaled = mul(w[part], load(v_scales(args, tile.parts[part])));
      w[part] = seen.template only<Whole>(part, scaled, set1(0.0f));
      store(scores + part * kLanes, w[part]);
    }
    largest = max(max(w[0], w[1]), max(w[2], w[3]));
    sum = add(add(w[0], w[1]), add(w[2], w[3]));
  }

  /// Turns the scores of G vectors from `v` on into weights of tokens.
  template <int G>
  static void weigh(const AttentionArgs& args, float (*scores)[kTileTokens], const Seen* seen, const Tile& tile, int v,
                    Vectors<Element>& vectors, Weights<Element, G>& weights) {
    take_scores<G>(scores, seen, v, vectors);
    F32x16 largest[round_up_to_4(G)], sums[round_up_to_4(G)];
    for (int g = 0; g < G; ++g) {
      if (seen[g].is_whole) {
        take_weights<true>(args, scores[g], seen[g], tile, v + g, vectors, largest[g], sums[g]);
      } else {
        take_weights<false>(args, scores[g], seen[g], tile, v + g, vectors, largest[g], sums[g]);
      }
    }
    for (int g = G; g < round_up_to_4(G); ++g) {
      largest[g] = largest[0];
      sums[g] = sums[0];
    }
    alignas(64) float largest_of[kLanes], sum_of[kLanes], inverse[kLanes];
    store(largest_of, set1(0.0f));
    store(sum_of, set1(0.0f));
    for (int g = 0; g < G; g += 4) {
      reduce_max_4(largest + g, largest_of + g);
      reduce_add_4(sums + g, sum_of + g);
    }
    scale_weights(largest_of, sum_of, weights.scale, inverse);
    for (int g = 0; g < G; ++g) {
      const F32x16 factor = set1(inverse[g]);
      for (int at = 0; at < kTileTokens; at += kLanes) {
        store_i16(weights.p[g] + at, to_i32(mul(load(scores[g] + at), factor)));
      }
    }
  }

  /// out[g][d0 …] += Σ p[g][t] · v[t][d0 …] over `parts`: G vectors, 16 · C columns.
  template <int G, int C>
  static void add_values(const AttentionArgs& args, const Weights<Element, G>& weights, const Tile& tile, Span parts,
                         Span, int d0, float* out, std::ptrdiff_t out_stride) {
    const std::ptrdiff_t line = std::ptrdiff_t{args.head_dim} * 2 * kBytes;
    constexpr std::ptrdiff_t kColumn = 2 * kLanes * kBytes;
    I32x16 sums[G][C];
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < C; ++c) sums[g][c] = set1_i32(0);
    }
    for (int part = parts.begin; part < parts.end; ++part) {
      const Part& here = tile.parts[part];
      const Part& there = tile.ahead[part];
      const std::uint8_t* v = here.v + here.slot / 2 * line + d0 * 2 * kBytes;
      const std::uint8_t* ahead = there.v + there.slot / 2 * line + d0 * 2 * kBytes;
      for (int t = 0; t < kLanes; t += 2, v += line, ahead += line) {
        I16x32 codes[C];
        for (int c = 0; c < C; ++c) {
          codes[c] = pairs(v + c * kColumn);  // a tail of 8 columns reads into the next line or the scales
          prefetch(ahead + c * kColumn);
        }
        for (int g = 0; g < G; ++g) {
          const I16x32 pair = broadcast_pair(weights.p[g] + part * kLanes + t);
          for (int c = 0; c < C; ++c) sums[g][c] = add_dot(sums[g][c], codes[c], pair);
        }
      }
    }
    for (int g = 0; g < G; ++g) {
      const F32x16 scale = set1(weights.scale[g]);
      for (int c = 0; c < C; ++c) {
        float* to = out + g * out_stride + d0 + c * kLanes;
        store(to, fma(to_f32(sums[g][c]), scale, load(to)));
      }
    }
  }
};

}  // namespace aotllm::cpu::AOTLLM_ISA
