#pragma once

#include <cstddef>

#include "elementwise/bf16x8.cuh"
#include "gemm/activation.cuh"
#include "sm80/fragments.cuh"
#include "sm80/gemm_shape.h"

// yᵀ = W · xᵀ by tiles, for any number of rows: operands are swapped, so that gate and up of a pair of rows meet in a
// thread's epilogue and 8 tokens fill the narrow side of an operation. W and x pass through a ring of stages of 128
// bytes along k, whose 16-byte pieces are permuted by the row (i ^ row % 8) for ldmatrix.
namespace aotllm::cuda::sm80 {

template <class Type, int kShape>
struct Tile {
  static constexpr TileShape kTile = kTileShapes[kShape];
  static constexpr int kRows = kTile.rows;
  static constexpr int kTokens = kTile.tokens;
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kRowBlocks = kRows / kTile.warps_along_rows / 16;  ///< operands of a warp
  static constexpr int kTokenBlocks = kTokens / kTile.warps_along_tokens / 8;
  static constexpr int kPitch = kTile.sums_pitch();
  static_assert(kTokenBlocks == 1 || kTokenBlocks % 2 == 0);

  using Sums = float[kRowBlocks][kTokenBlocks][4];

  const GemmProblem& problem;
  const LaunchArgs& args;
  std::uint8_t* shared;
  int row_tile;
  int token_tile;

  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int warp_row() const { return thread() / 32 % kTile.warps_along_rows * kRowBlocks * 16; }
  __device__ int warp_token() const { return thread() / 32 / kTile.warps_along_rows * kTokenBlocks * 8; }
  __device__ int tokens() const { return args.m - token_tile * kTokens; }  ///< of the tile and all behind it
  __device__ std::size_t row_bytes() const { return static_cast<std::size_t>(problem.w.k) * Type::kBytes; }

  /// `kCount` rows of a matrix at bytes [128 step, 128 step + 128) of k; zeros beyond its ends.
  template <int kCount>
  __device__ void load_rows(std::uint8_t* to, const void* matrix, int first, int end, int step) const {
    const int piece = thread() % 8;
    const std::size_t at = static_cast<std::size_t>(step) * 128 + static_cast<std::size_t>(piece) * 16;
    const auto* from = static_cast<const std::uint8_t*>(matrix);
#pragma unroll
    for (int row = 0; row < kCount; row += kThreads / 8) {
      const int mine = row + thread() / 8;
      if (kCount % (kThreads / 8) != 0 && mine >= kCount) break;
      const bool exists = first + mine < end && at < row_bytes();
      const std::size_t offset = exists ? static_cast<std::size_t>(first + mine) * row_bytes() + at : 0;
      copy16(to + mine * 128 + (piece ^ mine % 8) * 16, from + offset, exists);
    }
  }
  __device__ void load(int stage, int step) const {
    std::uint8_t* to = shared + stage * (kRows + kTokens) * 128;
    load_rows<kRows>(to, problem.w.data, row_tile * kRows, problem.w.n, step);
    load_rows<kTokens>(to + kRows * 128, problem.x, token_tile * kTokens, args.m, step);
  }

  __device__ static const std::uint8_t* piece(const std::uint8_t* matrix, int row, int piece) {
    return matrix + row * 128 + (piece ^ row % 8) * 16;
  }
  __device__ void multiply(Sums& sums, int stage) const {
    const std::uint8_t* w = shared + stage * (kRows + kTokens) * 128;
    const std::uint8_t* x = w + kRows * 128;
    const int lane = thread() % 32;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      std::uint32_t b[kTokenBlocks][2];
      if constexpr (kTokenBlocks == 1) {
        load_half_operand(b[0][0], b[0][1], piece(x, warp_token() + lane % 8, 2 * step + lane / 8 % 2));
      } else {
#pragma unroll
        for (int j = 0; j < kTokenBlocks; j += 2) {
          Operand pair;  // of 16 tokens: the first 8, then the others
          load_operand(pair, piece(x, warp_token() + 8 * j + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
          b[j][0] = pair[0], b[j][1] = pair[1], b[j + 1][0] = pair[2], b[j + 1][1] = pair[3];
        }
      }
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        Operand a;
        load_operand(a, piece(w, warp_row() + 16 * i + row_of_lane(), 2 * step + half_of_lane()));
#pragma unroll
        for (int j = 0; j < kTokenBlocks; ++j) multiply_add<Type>(sums[i][j], a, b[j][0], b[j][1]);
      }
    }
  }

  /// The sums over steps [begin, end) of k, in ascending order.
  __device__ void accumulate(Sums& sums, int begin, int end) const {
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (begin + stage < end) load(stage, begin + stage);
      cute::cp_async_fence();
    }
    int stage = 0;
    for (int step = begin; step < end; ++step) {
      cute::cp_async_wait<kStages - 2>();
      __syncthreads();
      const int ahead = step + kStages - 1;
      if (ahead < end) load(stage == 0 ? kStages - 1 : stage - 1, ahead);
      cute::cp_async_fence();
      multiply(sums, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    cute::cp_async_wait<0>();
    __syncthreads();  // the ring becomes memory for sums
  }

  /// Sums to shared memory: [tokens][kPitch].
  __device__ float* publish(const Sums& sums) const {
    auto* to = reinterpret_cast<float*>(shared);
    const int lane = thread() % 32;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kTokenBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = warp_row() + 16 * i + lane / 4 + e / 2 * 8;
          to[(warp_token() + 8 * j + lane % 4 * 2 + e % 2) * kPitch + row] = sums[i][j][e];
        }
      }
    }
    __syncthreads();
    return to;
  }
};

/// From sums of a tile to y: a thread makes 8 neighbouring values of a token at a time.
template <class Type, class Tile>
struct Finish {
  const GemmProblem& problem;
  const LaunchArgs& args;
  const float* sums;      ///< in shared memory, [tokens][kPitch]
  const float* partials;  ///< the tile's, [splits][tokens][rows], where sums are shared
  int first_row;
  int first_token;
  int tokens;

  /// The product for rows row … row + 7 of the tile.
  __device__ void product(float (&p)[8], int row, int token) const {
    if (args.splits == 1) {
      load(p, sums + token * Tile::kPitch + row);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) p[i] = 0.0f;
      for (int split = 0; split < args.splits; ++split) {
        const float* from = partials + (split * Tile::kTokens + token) * Tile::kRows + row;
        const float4 low = __ldcg(reinterpret_cast<const float4*>(from));
        const float4 high = __ldcg(reinterpret_cast<const float4*>(from) + 1);
        const float share[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) p[i] += share[i];
      }
    }
    float factors[8];
    if constexpr (Type::kBytes == 1) {
      const float x_scale = __ldcg(problem.x_scales + first_token + token);
      load_weights(problem.w.scales + first_row + row, factors);
#pragma unroll
      for (int i = 0; i < 8; ++i) p[i] *= factors[i] * x_scale;
    }
    if (problem.bias == nullptr) return;
    load_weights(problem.bias + first_row + row, factors);
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] += factors[i];
  }

  __device__ void finish() const {
    constexpr int kGroups = Tile::kRows / 8;
    for (int i = static_cast<int>(threadIdx.x); i < tokens * kGroups; i += Tile::kThreads) {
      const int row = i % kGroups * 8;
      const int token = i / kGroups;
      if (first_row + row >= problem.w.n) continue;
      float p[8];
      product(p, row, token);
      const std::size_t at = static_cast<std::size_t>(first_token + token) * problem.w.n + first_row + row;
      if (problem.epilogue == Epilogue::kLogits) {
        store_logits(p, static_cast<float*>(problem.y) + at);
        continue;
      }
      if (problem.epilogue == Epilogue::kResidual) {
        float residual[8];
        unpack(load_activation(problem.residual + at), residual);
#pragma unroll
        for (int e = 0; e < 8; ++e) p[e] += residual[e];
      }
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(problem.y) + at) = pack_bf16(p);
    }
  }

  /// Rows come in groups of 16: 8 of gate, then the same 8 of up.
  __device__ void finish_gated() const {
    constexpr int kGroups = Tile::kRows / 16;
    for (int i = static_cast<int>(threadIdx.x); i < tokens * kGroups; i += Tile::kThreads) {
      const int row = i % kGroups * 16;
      const int token = i / kGroups;
      if (first_row + row >= problem.w.n) continue;
      float gate[8];
      float up[8];
      product(gate, row, token);
      product(up, row + 8, token);
#pragma unroll
      for (int e = 0; e < 8; ++e) gate[e] = activate(gate[e], problem.activation) * up[e];
      auto* y =
          static_cast<__nv_bfloat16*>(problem.y) + static_cast<std::size_t>(first_token + token) * (problem.w.n / 2);
      *reinterpret_cast<uint4*>(y + (first_row + row) / 2) = pack_bf16(gate);
    }
  }

 private:
  __device__ static void load(float (&p)[8], const float* from) {
    *reinterpret_cast<float4*>(p) = *reinterpret_cast<const float4*>(from);
    *reinterpret_cast<float4*>(p + 4) = *reinterpret_cast<const float4*>(from + 4);
  }
  __device__ void store_logits(float (&p)[8], float* y) const {
    if (problem.softcap > 0.0f) {
#pragma unroll
      for (int e = 0; e < 8; ++e) p[e] = problem.softcap * tanhf(p[e] / problem.softcap);
    }
    reinterpret_cast<float4*>(y)[0] = make_float4(p[0], p[1], p[2], p[3]);
    reinterpret_cast<float4*>(y)[1] = make_float4(p[4], p[5], p[6], p[7]);
  }
};

/// Leaves this CTA's share of a tile in `to`. True for the last CTA to arrive, which adds all shares in order of k, so
/// that the sum does not depend on who that was.
template <class Tile>
__device__ bool share(const float* sums, float* to, unsigned* counter, int tokens, int splits) {
  __shared__ bool is_last;
  for (int i = static_cast<int>(threadIdx.x); i < tokens * Tile::kRows / 4; i += Tile::kThreads) {
    const int token = i / (Tile::kRows / 4);
    const int row = i % (Tile::kRows / 4) * 4;
    __stcg(reinterpret_cast<float4*>(to + token * Tile::kRows + row),
           *reinterpret_cast<const float4*>(sums + token * Tile::kPitch + row));
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counter, 1) + 1 == static_cast<unsigned>(splits);
    if (is_last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

/// Token tiles are walked in groups of so many for each step along the rows of W: what keeps x and W in the L2.
inline constexpr int kGroupHeight = 16;

/// Grid: (tiles, splits).
template <class Type, int kShape>
__global__ void __launch_bounds__(kTileShapes[kShape].threads(), 2)
    gemm_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ LaunchArgs args) {
  using Work = Tile<Type, kShape>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int tile = static_cast<int>(blockIdx.x);
  const int group = tile / (kGroupHeight * args.row_tiles);
  const int height = min(kGroupHeight, args.token_tiles - group * kGroupHeight);
  const int within = tile - group * kGroupHeight * args.row_tiles;
  const Work work{problem, args, shared, within / height, group * kGroupHeight + within % height};

  const int split = static_cast<int>(blockIdx.y);
  const int steps = static_cast<int>((work.row_bytes() + 127) / 128);
  typename Work::Sums registers = {};
  work.accumulate(registers, split * args.steps_per_split, min(steps, (split + 1) * args.steps_per_split));
  const float* sums = work.publish(registers);

  constexpr std::size_t kSize = std::size_t{Work::kTokens} * Work::kRows;
  const int tokens = min(Work::kTokens, work.tokens());
  float* partials = args.partials + static_cast<std::size_t>(tile) * args.splits * kSize;
  if (args.splits > 1 && !share<Work>(sums, partials + split * kSize, args.counters + tile, tokens, args.splits)) {
    return;
  }
  const Finish<Type, Work> finish{
      problem, args, sums, partials, work.row_tile * Work::kRows, work.token_tile * Work::kTokens, tokens};
  problem.epilogue == Epilogue::kGated ? finish.finish_gated() : finish.finish();
}

template <class Type, int... kShapes>
Kernel kernel_of(int shape, std::integer_sequence<int, kShapes...> /*all*/) {
  constexpr Kernel kKernels[] = {gemm_kernel<Type, kShapes>...};
  return kKernels[shape];
}

}  // namespace aotllm::cuda::sm80
