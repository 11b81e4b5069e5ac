#pragma once

#include "kernels/attention_softmax.h"
#include "kernels/attention_tile.h"

// The caches of float32 and bfloat16, as attention.cc wants a cache; arithmetic is in float32. Order of reduction:
//   score[t]   two chains over even and odd d, ascending, then their sum
//   Σp·v[d]    one chain over t, ascending
// V of slots that are not seen goes into no sum.

namespace aotllm::cpu::AOTLLM_ISA {

/// Sixteen lanes of two neighbours along the axis that is summed.
struct FloatPair {
  F32x16 first;
  F32x16 second;
};

template <KvType Type>
struct FloatCache {
  using Element = float;
  /// Vectors of a batch see the same tokens.
  static constexpr bool kMixesRows = false;
  static constexpr int kMaxBatch = kMaxBatchVectors / 2;  // of which each has two chains

  static constexpr bool kIsWide = Type == KvType::kF32;
  static constexpr std::ptrdiff_t kBytes = kIsWide ? 4 : 2;

  /// Bytes from one pair of rows of K (of d) or V (of tokens) to the next, of rows of `columns`.
  static std::ptrdiff_t pair_bytes(int columns) { return 2 * kBytes * columns; }
  /// Bytes from a column to the next.
  static constexpr std::ptrdiff_t kColumn = kIsWide ? kBytes : 2 * kBytes;

  /// Sixteen columns of a pair of rows: float32 row by row, bfloat16 by column.
  static FloatPair load_pair(const std::uint8_t* p, int columns) {
    const auto* floats = reinterpret_cast<const float*>(p);
    if constexpr (kIsWide) return {load(floats), load(floats + columns)};
    return widened(load(floats));
  }
  /// Eight columns: what is behind them may not be memory of ours.
  static FloatPair load_half_pair(const std::uint8_t* p, int columns) {
    const auto* floats = reinterpret_cast<const float*>(p);
    if constexpr (kIsWide) return {load_8(floats), load_8(floats + columns)};
    return widened(load_8(floats));
  }
  static FloatPair widened(F32x16 line) {
    return {from_bits(shift_left<16>(bits(line))), from_bits(bit_and(bits(line), set1_i32(-0x10000)))};
  }
  static void prefetch_pair(const std::uint8_t* p, int columns) {
    prefetch(p);
    if constexpr (kIsWide) prefetch(p + columns * kBytes);
  }

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
    const std::ptrdiff_t step = pair_bytes(args.tokens_per_block);
    for (int s = part; s < part + S; ++s) {
      const std::uint8_t* k = tile.parts[s].k + tile.parts[s].slot * kColumn;
      const std::uint8_t* ahead = tile.ahead[s].k + tile.ahead[s].slot * kColumn;
      F32x16 even[G], odd[G];
      for (int g = 0; g < G; ++g) even[g] = odd[g] = set1(0.0f);
      for (int d = 0; d < args.head_dim; d += 2, k += step, ahead += step) {
        const FloatPair pair = load_pair(k, args.tokens_per_block);
        prefetch_pair(ahead, args.tokens_per_block);
        for (int g = 0; g < G; ++g) {
          even[g] = fma(set1(q[g * q_stride + d]), pair.first, even[g]);
          odd[g] = fma(set1(q[g * q_stride + d + 1]), pair.second, odd[g]);
        }
      }
      for (int g = 0; g < G; ++g) store(scores[g] + s * kLanes, add(even[g], odd[g]));
    }
  }

  /// Turns the scores of G vectors from `v` on into the weights of tokens.
  template <int G>
  static void weigh(const AttentionArgs&, float (*scores)[kTileTokens], const Seen* seen, const Tile&, int v,
                    Vectors<Element>& vectors, Weights<Element, G>& weights) {
    take_scores<G>(scores, seen, v, vectors);
    for (int g = 0; g < G; ++g) {
      F32x16 p[kTileParts];
      if (seen[g].is_whole) {
        take_exponentials<true>(scores[g], seen[g], v + g, vectors, p);
      } else {
        take_exponentials<false>(scores[g], seen[g], v + g, vectors, p);
      }
      for (int part = 0; part < kTileParts; ++part) store(weights.p[g] + part * kLanes, p[part]);
    }
  }

  /// out[g][d0 …] += Σ p[g][t] · v[t][d0 …] over `span`: G vectors, 16 · C columns.
  template <int G, int C>
  static void add_values(const AttentionArgs& args, const Weights<Element, G>& weights, const Tile& tile, Span parts,
                         Span span, int d0, float* out, std::ptrdiff_t out_stride) {
    const std::ptrdiff_t step = pair_bytes(args.head_dim);
    const bool is_half = d0 + C * kLanes > args.head_dim;
    F32x16 sums[G][C];
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < C; ++c) sums[g][c] = load(out + g * out_stride + d0 + c * kLanes);
    }
    for (int part = parts.begin; part < parts.end; ++part) {
      const std::uint8_t* v = first_values(tile.parts[part], args.head_dim, d0);
      const std::uint8_t* ahead = first_values(tile.ahead[part], args.head_dim, d0);
      for (int t = part * kLanes; t < (part + 1) * kLanes; t += 2, v += step, ahead += step) {
        const bool sees_first = t >= span.begin && t < span.end;
        const bool sees_second = t + 1 >= span.begin && t + 1 < span.end;
        for (int c = 0; c < C; ++c) {
          const std::uint8_t* at = v + c * kLanes * kColumn;
          const bool is_last = c + 1 == C;
          const FloatPair pair = is_last && is_half ? load_half_pair(at, args.head_dim) : load_pair(at, args.head_dim);
          prefetch_pair(ahead + c * kLanes * kColumn, args.head_dim);
          if (sees_first) {
            for (int g = 0; g < G; ++g) sums[g][c] = fma(set1(weights.p[g][t]), pair.first, sums[g][c]);
          }
          if (sees_second) {
            for (int g = 0; g < G; ++g) sums[g][c] = fma(set1(weights.p[g][t + 1]), pair.second, sums[g][c]);
          }
        }
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < C; ++c) store(out + g * out_stride + d0 + c * kLanes, sums[g][c]);
    }
  }

 private:
  /// Column `d0` of the part's first pair of values.
  static const std::uint8_t* first_values(const Part& part, int head_dim, int d0) {
    return part.v + part.slot / 2 * pair_bytes(head_dim) + d0 * kColumn;
  }
};

}  // namespace aotllm::cpu::AOTLLM_ISA
