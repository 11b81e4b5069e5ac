#pragma once

#include "kernels/attention_softmax.h"
#include "kernels/attention_tile.h"

// Query vectors over one range of positions, and the fold of ranges.

namespace aotllm::cpu::AOTLLM_ISA {

/// score → softcap · tanh(score / softcap), as base-2 scores; `scale` is then 1.
inline void cap_scores(float softcap, Span parts, float scale, float* scores) {
  for (int part = parts.begin; part < parts.end; ++part) {
    float* at = scores + part * kLanes;
    const F32x16 inner = div(mul(load(at), set1(scale)), set1(softcap));
    store(at, mul(set1(softcap * kLog2E), tanh(inner)));
  }
}

/// The query vectors of a call over one range at a time.
template <class Cache>
class RangeAttention {
 public:
  using Element = typename Cache::Element;

  explicit RangeAttention(const AttentionArgs& args) : args_(args) {
    vectors_.stride = (args.head_dim + kLanes - 1) / kLanes * kLanes;
    const float scale = args.softcap > 0.0f ? args.scale : args.scale * kLog2E;
    for (int v = 0; v < args.rows * args.heads; ++v) {
      positions_[v] = args.position + v / args.heads;
      const float* q = args.q + v / args.heads * args.row_stride + v % args.heads * args.head_dim;
      Cache::take_query(args, q, scale, v, vectors_);
      inner_scale_[v] = vectors_.scale[v];
      if (args.softcap > 0.0f) vectors_.scale[v] = 1.0f;
    }
  }

  /// Vectors of rows that see a position in [begin, end).
  Span seeing(int begin, int end) const {
    Span rows{begin - args_.position, args_.rows};
    if (rows.begin < 0) rows.begin = 0;
    while (rows.end > rows.begin && args_.first_seen(args_.position + rows.end - 1) >= end) --rows.end;
    return {rows.begin * args_.heads, rows.end * args_.heads};
  }

  /// Runs the vectors that see the range; returns them.
  Span run(int begin) {
    const int end = next_kv_range(begin, args_.window);
    const Span span = seeing(begin, end);
    for (int v = span.begin; v < span.end; ++v) {
      vectors_.top[v] = -__builtin_inff();
      store(vectors_.sum[v], set1(0.0f));
      for (int d = 0; d < vectors_.stride; d += kLanes) store(vectors_.out + v * stride() + d, set1(0.0f));
    }
    const int from = args_.first_seen(args_.position);
    const int to = args_.last_position();
    int at = from < begin ? begin : from / kTileTokens * kTileTokens;
    const PartWalk walk(args_);
    for (; at < end && at <= to; at += kTileTokens) run_tile(walk.tile_at(at), seeing(at, at + kTileTokens));
    return span;
  }

  float top(int v) const { return vectors_.top[v]; }
  float sum(int v) const { return reduce_add(load(vectors_.sum[v])); }
  /// [head_dim], and zeros up to a multiple of 16.
  const float* out(int v) const { return vectors_.out + v * stride(); }

 private:
  static constexpr int kMaxBatch = Cache::kMaxBatch;

  std::ptrdiff_t stride() const { return vectors_.stride; }

  /// Batches of about equal sizes.
  void run_tile(const Tile& tile, Span span) {
    const bool is_seen =
        Seen(seen_by(span.begin, tile.first)).is_whole && Seen(seen_by(span.end - 1, tile.first)).is_whole;
    const int together = Cache::kMixesRows || is_seen ? span.end - span.begin : args_.heads;
    const int batches = (together + kMaxBatch - 1) / kMaxBatch;
    for (int first = span.begin; first < span.end; first += together) {
      for (int i = 0; i < batches; ++i) {
        const int v = together * i / batches;
        run_batch_of<kMaxBatch>(tile, first + v, together * (i + 1) / batches - v);
      }
    }
  }

  template <int G>
  void run_batch_of(const Tile& tile, int v, int count) {
    if constexpr (G > 1) {
      if (count < G) return run_batch_of<G - 1>(tile, v, count);
    }
    run_batch<G>(tile, v);
  }

  /// What the row of vector `v` sees of the tile at `first`.
  Span seen_by(int v, int first) const {
    const int from = args_.first_seen(positions_[v]) - first;
    const int to = positions_[v] + 1 - first;
    return {from < 0 ? 0 : from, to > kTileTokens ? kTileTokens : to};
  }

  /// G vectors from `v` on meet a tile, of which each sees something.
  template <int G>
  void run_batch(const Tile& tile, int v) {
    Seen seen[G];
    for (int g = 0; g < G; ++g) seen[g] = Seen(seen_by(v + g, tile.first));
    const Span parts{seen[0].tokens.begin / kLanes, (seen[G - 1].tokens.end + kLanes - 1) / kLanes};
    alignas(64) float scores[G][kTileTokens];
    const Element* q = vectors_.q + v * stride();
    int part = parts.begin;
    for (; part + kBatchLines <= parts.end; part += kBatchLines) {
      Cache::template score<G, kBatchLines>(args_, q, stride(), tile, part, scores);
    }
    for (; part < parts.end; ++part) Cache::template score<G, 1>(args_, q, stride(), tile, part, scores);
    fill_unseen<G>(parts, scores);

    Weights<Element, G> weights;
    for (int g = 0; g < G && args_.softcap > 0.0f; ++g) {
      cap_scores(args_.softcap, parts, inner_scale_[v + g], scores[g]);
    }
    Cache::template weigh<G>(args_, scores, seen, tile, v, vectors_, weights);

    float* out = vectors_.out + v * stride();
    int d = 0;
    for (; d + kBatchLines * kLanes <= vectors_.stride; d += kBatchLines * kLanes) {
      Cache::template add_values<G, kBatchLines>(args_, weights, tile, parts, seen[0].tokens, d, out, stride());
    }
    for (; d < vectors_.stride; d += kLanes) {
      Cache::template add_values<G, 1>(args_, weights, tile, parts, seen[0].tokens, d, out, stride());
    }
  }

  /// Scores of parts that no vector of the batch sees: any will do that is no trap.
  template <int G>
  static void fill_unseen(Span parts, float (*scores)[kTileTokens]) {
    for (int part = 0; part < kTileParts; ++part) {
      if (part >= parts.begin && part < parts.end) continue;
      for (int g = 0; g < G; ++g) store(scores[g] + part * kLanes, set1(0.0f));
    }
  }

  const AttentionArgs& args_;
  int positions_[kMaxVectors];      ///< of the vectors' rows
  float inner_scale_[kMaxVectors];  ///< of scores under the cap
  Vectors<Element> vectors_;
};

/// The fold of one vector's ranges, in order.
struct RangeFold {
  float top = 0.0f;
  float sum = 0.0f;

  /// Takes what a range has made: `from` is [head_dim]. `to`: the vector's sums over the ranges so far.
  void take(bool is_first, const float* from, float range_top, float range_sum, int head_dim, float* to) {
    if (is_first) {
      top = range_top;
      sum = range_sum;
      for (int d = 0; d < head_dim; d += kLanes) store_lanes(to + d, load(from + d), head_dim - d);
      return;
    }
    const bool rises = range_top > top;
    const F32x16 old_part = rises ? exp2_below(set1(top - range_top)) : set1(1.0f);
    const F32x16 new_part = rises ? set1(1.0f) : exp2_below(set1(range_top - top));
    const auto fold = [&](F32x16 before, F32x16 now) { return fma(now, new_part, mul(before, old_part)); };
    if (rises) top = range_top;
    alignas(64) float lanes[kLanes];
    store(lanes, fold(set1(sum), set1(range_sum)));
    sum = lanes[0];
    for (int d = 0; d < head_dim; d += kLanes) {
      store_lanes(to + d, fold(load_lanes(to + d, head_dim - d), load(from + d)), head_dim - d);
    }
  }

  /// Divides the sums over values by that of weights.
  void finish(int head_dim, float* out) const {
    const F32x16 inverse = set1(1.0f / sum);
    for (int d = 0; d < head_dim; d += kLanes) {
      store_lanes(out + d, mul(load_lanes(out + d, head_dim - d), inverse), head_dim - d);
    }
  }
};

}  // namespace aotllm::cpu::AOTLLM_ISA
