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
    for (int d = 0; d < args.head_dim; d += kLanes) {
      store_i16(codes + d, to_codes(load_lanes(q + d, args.head_dim - d), q_scale, kLargestCode16));
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

  /// weight = scale · code, no code above 32767 and their sum such that sums of products stay below 2^31.
  static float weight_scale(const F32x16 (&w)[kTileParts]) {
    const auto magnitude = [](F32x16 x) { return bit_and(bits(x), set1_i32(INT32_MAX)); };  // NaN above all
    const I32x16 largest = max(max(magnitude(w[0]), magnitude(w[1])), max(magnitude(w[2]), magnitude(w[3])));
    const float by_largest = __builtin_bit_cast(float, reduce_max(largest)) * (1.0f / kLargestCode16);
    if constexpr (Type == KvType::kI8) return by_largest;
    const float by_sum = reduce_add(add(add(w[0], w[1]), add(w[2], w[3]))) * (1.0f / 131000.0f);
    return by_largest > by_sum ? by_largest : by_sum;
  }

  /// Turns the scores of vector `v` into weights of its tokens, number `g` of a batch.
  template <int G>
  static void weigh(const AttentionArgs& args, const float* scores, Span span, const Tile& tile, int v,
                    Vectors<Element>& vectors, int g, Weights<Element, G>& weights) {
    F32x16 p[kTileParts];
    take_exponentials(scores, span, v, vectors, p);
    const bool whole = is_whole(span);
    for (int part = 0; part < kTileParts; ++part) {
      if (whole) {
        p[part] = mul(p[part], load(v_scales(args, tile.parts[part])));
      } else if (part * kLanes < span.end && (part + 1) * kLanes > span.begin) {
        const F32x16 scaled = mul(p[part], load(v_scales(args, tile.parts[part])));
        p[part] = select(seen_lanes(span, part), scaled, set1(0.0f));
      }
    }
    const float scale = weight_scale(p);
    // Where all weights are next to nothing, they are nothing: 1 / scale has to be finite. A NaN goes on in the scale.
    const bool is_nothing = scale < 1e-34f;
    const F32x16 inverse = set1(is_nothing ? 0.0f : 1.0f / scale);
    weights.scale[g] = is_nothing ? 0.0f : scale;
    for (int part = 0; part < kTileParts; ++part) {
      store_i16(weights.p[g] + part * kLanes, to_i32(mul(p[part], inverse)));
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
