#pragma once

#include "elementwise/bf16x8.cuh"
#include "gemm/activation.cuh"
#include "gemm/skinny_exchange.cuh"
#include "gemm/skinny_gemm.h"
#include "gemm/skinny_shape.cuh"
#include "group_codes.cuh"

// From sums in shared memory to y: a thread makes 8 neighbouring values of a token at a time, so that y and the
// residual are accessed in pieces of 16 bytes, and so that the code, which a CTA runs once or twice, is short.
namespace aotllm::cuda {

/// p += 8 values of bf16.
__device__ inline void skinny_add_bf16(float (&p)[8], const uint4& packed) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    p[2 * i] += pair.x, p[2 * i + 1] += pair.y;
  }
}

__device__ inline uint4 skinny_pack(const float (&values)[8]) {
  uint4 packed;
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  return packed;
}

/// Codes of 8 values of a row [width] from `column` on, by kCodeGroup / 8 neighbouring lanes that share a scale.
__device__ inline void skinny_store_codes(const GroupCodes& to, float (&values)[8], int row, int column, int width) {
  constexpr int kLanes = kCodeGroup / 8;
  const unsigned mask = ((1u << kLanes) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(mask, largest, step));
  const GroupScale scale(largest);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] *= scale.inverse;
  *reinterpret_cast<uint2*>(to.codes + static_cast<std::size_t>(row) * width + column) = pack_fp8(values);
  if (column % kCodeGroup == 0) to.scales[column / kCodeGroup * to.scale_rows + row] = scale.scale;
}

/// What sums are multiplied by, and what is added: in registers, on its way, while a tile is computed, then in shared
/// memory for all consumers of the CTA: [kRows] bias and, for kFp8, [kRows] scales of W and [kTokens] scales of X. In a
/// chain there are [kRows] weights of the next norm and [warps, kTokens] sums of squares in place of X's scales.
template <class Shape>
struct SkinnyFactors {
  static_assert(Shape::kConsumers == 2 * Shape::kRows);
  float* memory;
  float of_row = 0.0f;  // bias of row threadIdx.x or, from kRows on, the scale of row threadIdx.x - kRows
  float of_token = 0.0f;
  float of_norm = 0.0f;
  bool has_squares = false;

  __device__ void load(const SkinnyArgs& args, int tile, int m) {
    const int thread = static_cast<int>(threadIdx.x);
    const int row = tile * Shape::kRows + thread % Shape::kRows;
    const float* from = thread < Shape::kRows ? args.bias : Shape::kScaled ? args.w_scales : nullptr;
    of_row = from != nullptr && row < args.n ? __ldg(from + row) : 0.0f;
    if constexpr (Shape::kChained) {
      const bool is_normed = args.link.next_norm != nullptr && thread < Shape::kRows && row < args.n;
      if (is_normed) of_norm = __ldg(args.link.next_norm + row);
      if (!has_squares) of_token = sum_squares(args.link);
      has_squares = true;
    } else if (Shape::kScaled && thread < m) {
      of_token = __ldcg(args.x_scales + thread);
    }
  }
  __device__ void store() const {
    const int thread = static_cast<int>(threadIdx.x);
    if (Shape::kScaled || thread < Shape::kRows) memory[thread] = of_row;
    if constexpr (Shape::kChained) {
      if (thread < Shape::kRows) memory[2 * Shape::kRows + thread] = of_norm;
      float sum = of_token;
#pragma unroll
      for (int step = Shape::kTokens; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const int lane = thread % 32;
      if (lane < Shape::kTokens) memory[3 * Shape::kRows + thread / 32 * Shape::kTokens + lane] = sum;
    } else if (Shape::kScaled && thread < Shape::kTokens) {
      memory[2 * Shape::kRows + thread] = of_token;
    }
  }

  /// p[i] belongs to row `row` + i of the tile; rows are multiples of 8.
  __device__ void apply(const SkinnyArgs& args, float (&p)[8], int row, int token) const {
    float bias[8];
    read(bias, row);
    if constexpr (Shape::kScaled) {
      const float x_scale = Shape::kChained ? inverse_rms(args.link, token) : memory[2 * Shape::kRows + token];
      float w_scale[8];
      read(w_scale, Shape::kRows + row);
#pragma unroll
      for (int i = 0; i < 8; ++i) p[i] *= w_scale[i] * x_scale;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] += bias[i];
  }

  /// Multiplies by the next norm's weights.
  __device__ void apply_norm(float (&p)[8], int row) const {
    float weight[8];
    read(weight, 2 * Shape::kRows + row);
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] *= weight[i];
  }

 private:
  /// This thread's part of the squares of token threadIdx.x % kTokens of X.
  __device__ static float sum_squares(const SkinnyLink& link) {
    float sum = 0.0f;
    const int count = link.normed_tiles * Shape::kTokens;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < count; i += Shape::kConsumers) sum += __ldcg(link.squares + i);
    return sum;
  }
  __device__ float inverse_rms(const SkinnyLink& link, int token) const {
    if (link.normed_tiles == 0) return 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Shape::kConsumers / 32; ++warp) {
      sum += memory[3 * Shape::kRows + warp * Shape::kTokens + token];
    }
    return rsqrtf(sum / link.normed_width + link.eps);
  }
  __device__ void read(float (&values)[8], int at) const {
    *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(memory + at);
    *reinterpret_cast<float4*>(values + 4) = *reinterpret_cast<const float4*>(memory + at + 4);
  }
};

/// Of the 128 threads of a warpgroup, which finish its 64 rows of a tile.
template <class Shape>
struct SkinnyEpilogue {
  const SkinnyArgs& args;
  SkinnySums<Shape> sums;
  const SkinnyFactors<Shape>& factors;
  int tile;
  int m;

  __device__ static int warpgroup() { return static_cast<int>(threadIdx.x) / 128; }
  __device__ static int thread() { return static_cast<int>(threadIdx.x) % 128; }
  __device__ Epilogue epilogue() const { return Shape::kRole.is_known ? Shape::kRole.epilogue : args.epilogue; }
  __device__ int row64() const { return tile * Shape::kRows + 64 * warpgroup(); }

  /// y of tokens [8 first, 8 (first + groups)) below m, whose sums are groups 0 … groups - 1 of `slots` slots.
  __device__ void finish(int slots, int first, int groups) const {
    const int end = min(m, 8 * (first + groups));
    if (epilogue() == Epilogue::kGated) return finish_gated(slots, 8 * first, end);
    const int row8 = thread() % 8 * 8;
    if (row64() + row8 >= args.n) return;
#pragma unroll 1
    for (int token = 8 * first + thread() / 8; token < end; token += 16) {
      const std::size_t at = static_cast<std::size_t>(token) * args.n + row64() + row8;
      uint4 residual = {};
      if (epilogue() == Epilogue::kResidual) residual = __ldcg(reinterpret_cast<const uint4*>(args.residual + at));
      float p[8];
      product(p, slots, token / 8 - first, row8, token);
      if (epilogue() == Epilogue::kLogits) {
        store_logits(p, at);
      } else {
        if (epilogue() == Epilogue::kResidual) skinny_add_bf16(p, residual);
        const uint4 packed = skinny_pack(p);
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.y) + at) = packed;
        if constexpr (Shape::kChained) hand_on_rows(packed, row8, token);
      }
    }
  }

 private:
  /// The sums over `slots`, scaled and biased, of rows row8 … row8 + 7 of the warpgroup.
  __device__ void product(float (&p)[8], int slots, int group, int row8, int token) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] = 0.0f;
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) sums.add(p, slot, group, warpgroup(), row8, token % 8);
    factors.apply(args, p, 64 * warpgroup() + row8, token);
  }

  /// Rows come in groups of 16: 8 of gate, then the same 8 of up.
  __device__ void finish_gated(int slots, int begin, int end) const {
    const int row16 = thread() % 4 * 16;
    if (row64() + row16 >= args.n) return;
#pragma unroll 1
    for (int token = begin + thread() / 4; token < end; token += 32) {
      float gate[8];
      float up[8];
      product(gate, slots, (token - begin) / 8, row16, token);
      product(up, slots, (token - begin) / 8, row16 + 8, token);
#pragma unroll
      for (int i = 0; i < 8; ++i) gate[i] = activate(gate[i], args.activation) * up[i];
      const int column = (row64() + row16) / 2;
      if constexpr (Shape::kChained) {
        skinny_store_codes(args.link.next, gate, token, column, args.n / 2);
      } else {
        auto* y = static_cast<__nv_bfloat16*>(args.y) + static_cast<std::size_t>(token) * (args.n / 2);
        *reinterpret_cast<uint4*>(y + column) = skinny_pack(gate);
      }
    }
  }

  /// 8 values of the residual stream, for the norm that follows.
  __device__ void hand_on_rows(const uint4& packed, int row8, int token) const {
    const SkinnyLink& link = args.link;
    if (link.next.codes == nullptr) return;
    float p[8] = {};
    skinny_add_bf16(p, packed);  // as the stream has them
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) square = fmaf(p[i], p[i], square);
    const unsigned mask = 0xFFu << (threadIdx.x % 32 / 8 * 8);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) square += __shfl_xor_sync(mask, square, step);
    if (threadIdx.x % 8 == 0) link.next_squares[row64() / 64 * Shape::kTokens + token] = square;
    factors.apply_norm(p, 64 * warpgroup() + row8);
    skinny_store_codes(link.next, p, token, row64() + row8, args.n);
  }

  __device__ void store_logits(float (&p)[8], std::size_t at) const {
    if (args.softcap > 0.0f) {
#pragma unroll
      for (int i = 0; i < 8; ++i) p[i] = args.softcap * tanhf(p[i] / args.softcap);
    }
    auto* y = reinterpret_cast<float4*>(static_cast<float*>(args.y) + at);
    y[0] = make_float4(p[0], p[1], p[2], p[3]);
    y[1] = make_float4(p[4], p[5], p[6], p[7]);
  }
};

}  // namespace aotllm::cuda
