#pragma once

#include <cmath>
#include <cstddef>
#include <numbers>

#include "aotllm/errors.h"
#include "attention/attention.h"
#include "elementwise/bf16x8.cuh"
#include "sm80/fragments.cuh"

// What both attentions are made of: a warp has 16 rows of queries (positions of one head, or heads that share a KV
// head) and goes through tiles of keys and values, with a running maximum and sum for each row.
namespace aotllm::cuda::sm80 {

/// Rows of K, V and Q in shared memory are `pitch` bytes apart: 16 more than they have, so that ldmatrix finds 8 of
/// them in different banks.
template <int kHeadDim>
inline constexpr int kPitch = kHeadDim * 2 + 16;

/// The cache of one KV head of one sequence.
struct PagedHead {
  const std::uint8_t* base;
  const std::int32_t* table;
  std::size_t block_stride;
  std::size_t values;  ///< bytes from a key to its value
  int block_shift;     ///< log2 of tokens_per_block
  int head_dim;

  __device__ PagedHead(const KvLayerView& kv, int sequence, int kv_head)
      : table(kv.block_table + static_cast<std::size_t>(sequence) * kv.table_stride),
        block_stride(kv.block_stride),
        values(std::size_t{2} * kv.num_kv_heads * kv.tokens_per_block * kv.head_dim),
        head_dim(kv.head_dim) {
    block_shift = __ffs(kv.tokens_per_block) - 1;
    base = kv.base + std::size_t{2} * kv_head * kv.tokens_per_block * kv.head_dim;
  }

  /// The key at `position`, which the sequence has.
  __device__ const std::uint8_t* key(int position) const {
    const int within = position & ((1 << block_shift) - 1);
    return base + static_cast<std::size_t>(__ldg(table + (position >> block_shift))) * block_stride +
           static_cast<std::size_t>(within * head_dim) * 2;
  }
};

inline void check_bf16(const KvLayerView& kv) {
  if (kv.type == KvType::kBf16) return;
  throw Error(ErrorKind::kInternal, "attention before SM90 reads caches of bf16 only");
}

/// Positions [begin, end) of a sequence; nothing is read outside.
struct Range {
  int begin;
  int end;

  __device__ bool has(int position) const { return position >= begin && position < end; }
};

/// `kKeys` keys, or values, from `first` on to shared memory, by `kThreads` threads; zeros where `range` has none.
template <int kHeadDim, int kKeys, int kThreads>
__device__ void load_rows(std::uint8_t* to, const PagedHead& head, bool values, int first, const Range& range,
                          int thread) {
  constexpr int kPieces = kHeadDim / 8;
#pragma unroll 4
  for (int i = 0; i < kKeys * kPieces; i += kThreads) {
    const int at = i + thread;
    if (kKeys * kPieces % kThreads != 0 && at >= kKeys * kPieces) break;
    const int row = at / kPieces;
    const int piece = at % kPieces;
    const bool exists = range.has(first + row);
    const std::uint8_t* from = exists ? head.key(first + row) + (values ? head.values : 0) + piece * 16 : head.base;
    copy16(to + row * kPitch<kHeadDim> + piece * 16, from, exists);
  }
}

/// How scores become exponents of 2.
struct Scale {
  float factor;  ///< of q·k
  float cap;     ///< softcap · log2 e, or 0

  __host__ __device__ Scale(float scale, float softcap) {
    constexpr float kLog2e = std::numbers::log2e_v<float>;
    cap = softcap * kLog2e;
    factor = softcap > 0.0f ? 2.0f * kLog2e * scale / softcap : scale * kLog2e;
  }
  __device__ float operator()(float product) const {
    const float x = product * factor;
    return cap > 0.0f ? cap - 2.0f * cap / (1.0f + exp2f(x)) : x;  // cap · tanh
  }
};

/// A warp's 16 rows. Of each, a lane keeps the columns of fragments.cuh.
template <int kHeadDim, int kKeys>
struct WarpRows {
  static constexpr int kDims = kHeadDim / 8;

  float values[kDims][4] = {};                ///< Σ weight · v, not yet divided
  float maximum[2] = {-INFINITY, -INFINITY};  ///< of rows lane / 4 and lane / 4 + 8, as exponents of 2
  float sum[2] = {};                          ///< of this lane's columns

  using Scores = float[kKeys / 8][4];

  /// scores = Q · Kᵀ of the warp's rows, from shared memory.
  __device__ static void multiply(Scores& scores, const std::uint8_t* q, const std::uint8_t* k) {
    constexpr int kRow = kPitch<kHeadDim>;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint8_t* of_q = q + row_of_lane() * kRow + half_of_lane() * 16;
    const std::uint8_t* of_k = k + (lane % 8 + lane / 16 * 8) * kRow + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      Operand a;
      load_operand(a, of_q + step * 32);
#pragma unroll
      for (int j = 0; j < kKeys / 8; j += 2) {
        Operand b;  // of 16 keys
        load_operand(b, of_k + j * 8 * kRow + step * 32);
        multiply_add<Bf16Type>(scores[j], a, b[0], b[1]);
        multiply_add<Bf16Type>(scores[j + 1], a, b[2], b[3]);
      }
    }
  }

  /// Scores become weights; what was summed up is brought to the new maximum. `sees(row, key)` says whether row 0 or 1
  /// of the lane sees a key of the tile; `all`, that every row sees every key.
  template <class Sees>
  __device__ void weigh(Scores& scores, const Scale& scale, bool all, const Sees& sees) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float largest = -INFINITY;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j][2 * row + e];
          score = all || sees(row, 8 * j + lane % 4 * 2 + e) ? scale(score) : -INFINITY;
          largest = fmaxf(largest, score);
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
      const float before = maximum[row];
      maximum[row] = fmaxf(before, largest);
      const float base = maximum[row] == -INFINITY ? 0.0f : maximum[row];  // nothing seen yet: weights are 0
      const float shrink = exp2f(before - base);
      sum[row] *= shrink;
#pragma unroll
      for (int d = 0; d < kDims; ++d) values[d][2 * row] *= shrink, values[d][2 * row + 1] *= shrink;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j][2 * row + e];
          score = exp2f(score - base);
          sum[row] += score;
        }
      }
    }
  }

  /// values += weights · V.
  __device__ void add(const Scores& weights, const std::uint8_t* v) {
    constexpr int kRow = kPitch<kHeadDim>;
    const std::uint8_t* of_v = v + row_of_lane() * kRow + half_of_lane() * 16;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const Operand a = {pack_bf16x2(weights[2 * step][0], weights[2 * step][1]),
                         pack_bf16x2(weights[2 * step][2], weights[2 * step][3]),
                         pack_bf16x2(weights[2 * step + 1][0], weights[2 * step + 1][1]),
                         pack_bf16x2(weights[2 * step + 1][2], weights[2 * step + 1][3])};
#pragma unroll
      for (int d = 0; d < kDims; d += 2) {
        Operand b;  // of 16 dims
        load_transposed(b, of_v + step * 16 * kRow + d * 16);
        multiply_add<Bf16Type>(values[d], a, b[0], b[1]);
        multiply_add<Bf16Type>(values[d + 1], a, b[2], b[3]);
      }
    }
  }

  /// The sum of a row over all lanes that have columns of it.
  __device__ float total(int row) const {
    float all = sum[row] + __shfl_xor_sync(~0U, sum[row], 1);
    return all + __shfl_xor_sync(~0U, all, 2);
  }
};

}  // namespace aotllm::cuda::sm80
