#pragma once

#include "kernels/attention_softmax.h"
#include "kernels/attention_tile.h"

// The float32 cache, as attention.cc wants a cache. Order of reduction:
//   score[t]   two chains over even and odd d, ascending, then their sum
//   Σp·v[d]    one chain over t, ascending
// V of slots that are not seen is never read.

namespace aotllm::cpu::AOTLLM_ISA {

struct FloatCache {
  using Element = float;
  /// Vectors of a batch are of one row, so that they see the same tokens.
  static constexpr bool kMixesRows = false;
  static constexpr int kMaxBatch = kMaxBatchVectors / 2;  // of which each has two chains

  static const float* floats(const std::uint8_t* p) { return reinterpret_cast<const float*>(p); }

  /// Takes vector `v` of the call, [head_dim]. `scale`: of its scores; q takes it on.
  static void take_query(const AttentionArgs& args, const float* q, float scale, int v, Vectors<Element>& vectors) {
    float* to = vectors.q + static_cast<std::ptrdiff_t>(v) * vectors.stride;
    for (int d = 0; d < args.head_dim; d += kLanes) {
      store(to + d, mul(load_lanes(q + d, args.head_dim - d), set1(scale)));
    }
    vectors.scale[v] = 1.0f;
  }

  /// Scores of G vectors and S parts from `part` on: scores[g][part · 16 …].
  template <int G, int S>
  static void score(const AttentionArgs& args, const float* q, std::ptrdiff_t q_stride, const Tile& tile, int part,
                    float (*scores)[kTileTokens]) {
    for (int s = part; s < part + S; ++s) {
      const float* k = floats(tile.parts[s].k) + tile.parts[s].slot;
      F32x16 even[G], odd[G];
      for (int g = 0; g < G; ++g) even[g] = odd[g] = set1(0.0f);
      for (int d = 0; d < args.head_dim; d += 2, k += 2 * args.tokens_per_block) {
        const F32x16 k0 = load(k);
        const F32x16 k1 = load(k + args.tokens_per_block);
        for (int g = 0; g < G; ++g) {
          even[g] = fma(set1(q[g * q_stride + d]), k0, even[g]);
          odd[g] = fma(set1(q[g * q_stride + d + 1]), k1, odd[g]);
        }
      }
      for (int g = 0; g < G; ++g) store(scores[g] + s * kLanes, add(even[g], odd[g]));
    }
  }

  /// Turns the scores of vector `v` into the weights of its tokens, number `g` of a batch.
  template <int G>
  static void weigh(const AttentionArgs&, const float* scores, Span span, const Tile&, int v, Vectors<Element>& vectors,
                    int g, Weights<Element, G>& weights) {
    F32x16 p[kTileParts];
    take_exponentials(scores, span, v, vectors, p);
    for (int part = 0; part < kTileParts; ++part) store(weights.p[g] + part * kLanes, p[part]);
  }

  /// out[g][d0 …] += Σ p[g][t] · v[t][d0 …] over `span`: G vectors, 16 · C columns.
  template <int G, int C>
  static void add_values(const AttentionArgs& args, const Weights<Element, G>& weights, const Tile& tile, Span parts,
                         Span span, int d0, float* out, std::ptrdiff_t out_stride) {
    F32x16 sums[G][C];
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < C; ++c) sums[g][c] = load(out + g * out_stride + d0 + c * kLanes);
    }
    for (int part = parts.begin; part < parts.end; ++part) {
      const int begin = part * kLanes > span.begin ? part * kLanes : span.begin;
      const int end = (part + 1) * kLanes < span.end ? (part + 1) * kLanes : span.end;
      const float* v = floats(tile.parts[part].v) + std::ptrdiff_t{tile.parts[part].slot} * args.head_dim + d0;
      for (int t = begin; t < end; ++t) {
        const float* row = v + std::ptrdiff_t{t - part * kLanes} * args.head_dim;
        for (int c = 0; c < C; ++c) {
          const bool is_half = d0 + (c + 1) * kLanes > args.head_dim;  // what is behind it may not be memory of ours
          const F32x16 values = is_half ? load_8(row + c * kLanes) : load(row + c * kLanes);
          for (int g = 0; g < G; ++g) sums[g][c] = fma(set1(weights.p[g][t]), values, sums[g][c]);
        }
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < C; ++c) store(out + g * out_stride + d0 + c * kLanes, sums[g][c]);
    }
  }
};

}  // namespace aotllm::cpu::AOTLLM_ISA
