#pragma once

#include "attention/decode_fragments.cuh"
#include "attention/decode_params.cuh"
//
#include <cutlass/arch/barrier.h>

namespace aotllm::cuda {

/// What a lane holds of a warp's running result for an item: heads 8 n + 2 (lane % 4) + j.
template <class Tile, int HeadTiles>
struct DecodeState {
  static constexpr int kDimTiles = Tile::kHeadDim / 16;
  float maximum[HeadTiles][2];  ///< log2 of the largest weight, the same in lanes of one head; −∞ before the first
  float sum[HeadTiles][2];      ///< of this lane's positions only
  float values[kDimTiles][HeadTiles][4];

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < HeadTiles; ++n) {
      maximum[n][0] = maximum[n][1] = -INFINITY;
      sum[n][0] = sum[n][1] = 0.0f;
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[d][n][i] = 0.0f;
      }
    }
  }
};

/// The part of a tile's positions that a warp works on.
struct WarpSlab {
  int begin;  ///< attended to are positions [begin, end) of the tile
  int end;
  int index;  ///< of the warp's 16 positions in the tile

  __device__ int first() const { return index * kDecodeSlab; }
  __device__ bool any() const { return first() < end && first() + kDecodeSlab > begin; }
  __device__ bool all() const { return first() >= begin && first() + kDecodeSlab <= end; }
  __device__ bool holds(int position) const { return position >= begin && position < end; }
};

/// scores[n]: positions lane / 4 and 8 more of the slab, heads 8 n + 2 (lane % 4) and the next.
template <int HeadTiles>
using DecodeScores = float[HeadTiles][4];

/// Loads of a warp in flight; fewer where registers are short.
template <class Tile, int HeadTiles>
inline constexpr int kPiecesAhead = Tile::kHeadDim * HeadTiles > 256 ? 2 : 4;

template <class Tile, int HeadTiles>
__device__ void score_keys(std::uint32_t keys, const WarpSlab& slab, const DetachedRow& detached,
                           const QueryOperands<Tile, HeadTiles>& q, DecodeScores<HeadTiles>& scores) {
  float sums[2][HeadTiles][4] = {};  // two chains hide the latency of the tensor cores
  const auto reader = SlabReader<Tile>::template make<false>(keys, slab.index, detached);
  for_pieces<Tile, kPiecesAhead<Tile, HeadTiles>>(reader, load_operand, [&](int piece, const Operand& x) {
    Operands<Tile::kType> a;
    to_key_operands<Tile::kType>(x, a);
    constexpr int kOperands = sizeof(a) / sizeof(Operand);
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      const int step = kOperands * piece + i;
#pragma unroll
      for (int n = 0; n < HeadTiles; ++n) {
        multiply_add<Tile::kType>(sums[step % 2][n], a[i], q.b[step][n][0], q.b[step][n][1]);
      }
    }
  });
#pragma unroll
  for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = sums[0][n][i] + sums[1][n][i];
  }
}

/// Scores to log2 of weights; −∞ for positions that are not attended to (whose keys may be anything).
template <class Tile, int HeadTiles>
__device__ void scale_and_mask(const WarpSlab& slab, const QueryOperands<Tile, HeadTiles>& q, float cap,
                               DecodeScores<HeadTiles>& scores) {
#pragma unroll
  for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[n][i] *= q.scale[n][i % 2];
      // The hyperbolic tangent of half of it.
      if (cap > 0.0f) scores[n][i] = cap * (1.0f - __fdividef(2.0f, 1.0f + exp2f(scores[n][i])));
    }
  }
  if (slab.all()) return;
  const int position = slab.first() + opaque_thread() % 32 / 4;
#pragma unroll
  for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!slab.holds(position + i / 2 * 8)) scores[n][i] = -INFINITY;
    }
  }
}

/// Advances maximum and sum by a slab, rescales the values so far; scores become weights. At least one position of the
/// slab is attended to, so that the maximum is a number.
template <class Tile, int HeadTiles>
__device__ void weigh(DecodeScores<HeadTiles>& scores, DecodeState<Tile, HeadTiles>& state) {
  bool changed = false;
  float factor[HeadTiles][2];
#pragma unroll
  for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float maximum = fmaxf(state.maximum[n][j], fmaxf(scores[n][j], scores[n][2 + j]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
      changed = changed || maximum != state.maximum[n][j];
      factor[n][j] = exp2f(state.maximum[n][j] - maximum);
      state.maximum[n][j] = maximum;
      scores[n][j] = exp2f(scores[n][j] - maximum);
      scores[n][2 + j] = exp2f(scores[n][2 + j] - maximum);
      state.sum[n][j] = state.sum[n][j] * factor[n][j] + (scores[n][j] + scores[n][2 + j]);
    }
  }
  if (!__any_sync(~0u, changed)) return;  // every factor is 1
#pragma unroll
  for (int d = 0; d < DecodeState<Tile, HeadTiles>::kDimTiles; ++d) {
#pragma unroll
    for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.values[d][n][i] *= factor[n][i % 2];
    }
  }
}

/// Masks for what an operand of V holds: positions that are not attended to become 0, as 0 · NaN would be NaN.
struct ValueMask {
  std::uint32_t bits[2];  ///< of the first and last 8 positions

  __device__ explicit ValueMask(const WarpSlab& slab) {
    const int position = slab.first() + 2 * (opaque_thread() % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bits[half] =
          (slab.holds(position + 8 * half) ? 0x0000ffffu : 0) | (slab.holds(position + 8 * half + 1) ? 0xffff0000u : 0);
    }
  }
  __device__ void apply(Operand& a) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.r[i] &= bits[i / 2];
  }
};

template <bool Masked, class Tile, int HeadTiles>
__device__ void add_slab(std::uint32_t values, const WarpSlab& slab, const DetachedRow& detached,
                         const std::uint32_t (&p)[HeadTiles][2], DecodeState<Tile, HeadTiles>& state) {
  const ValueMask mask(slab);
  const auto reader = SlabReader<Tile>::template make<Tile::kType == KvType::kBf16>(values, slab.index, detached);
  for_pieces<Tile, kPiecesAhead<Tile, HeadTiles>>(reader, load_transposed, [&](int piece, const Operand& x) {
    Operands<Tile::kType> a;
    to_value_operands<Tile::kType>(x, a);
    constexpr int kOperands = sizeof(a) / sizeof(Operand);
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      if constexpr (Masked) mask.apply(a[i]);
#pragma unroll
      for (int n = 0; n < HeadTiles; ++n) {
        multiply_add<Tile::kType>(state.values[kOperands * piece + i][n], a[i], p[n][0], p[n][1]);
      }
    }
  });
}

/// Weights to the operand P: what a lane holds of heads (two neighbours) becomes two neighbouring positions.
template <KvType Type, int HeadTiles>
__device__ void to_weight_operands(const DecodeScores<HeadTiles>& weights, std::uint32_t (&p)[HeadTiles][2]) {
#pragma unroll
  for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      cute::SM75_U32x1_MOVM_T::copy(pack_pair<Type>(weights[n][2 * half], weights[n][2 * half + 1]), p[n][half]);
    }
  }
}

template <class Tile, int HeadTiles>
__device__ void add_values(std::uint32_t values, const WarpSlab& slab, const DetachedRow& detached,
                           const std::uint32_t (&p)[HeadTiles][2], DecodeState<Tile, HeadTiles>& state) {
  if (slab.all()) {
    add_slab<false, Tile, HeadTiles>(values, slab, detached, p, state);
  } else {
    add_slab<true, Tile, HeadTiles>(values, slab, detached, p, state);
  }
}

}  // namespace aotllm::cuda
