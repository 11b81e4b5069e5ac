#pragma once

#include "gemm/activation.cuh"
#include "gemm/skinny_exchange.cuh"
#include "gemm/skinny_gemm.h"
#include "gemm/skinny_shape.cuh"

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

/// What sums are multiplied by, and what is added: in registers, on its way, while a tile is computed, then in shared
/// memory for all consumers of the CTA: [kRows] bias and, for kFp8, [kRows] scales of W and [kTokens] scales of X.
template <class Shape>
struct SkinnyFactors {
  static_assert(Shape::kConsumers == 2 * Shape::kRows);
  float* memory;
  float of_row = 0.0f;  // bias of row threadIdx.x or, from kRows on, the scale of row threadIdx.x - kRows
  float of_token = 0.0f;

  __device__ void load(const SkinnyArgs& args, int tile, int m) {
    const int thread = static_cast<int>(threadIdx.x);
    const int row = tile * Shape::kRows + thread % Shape::kRows;
    const float* from = thread < Shape::kRows ? args.bias : Shape::kScaled ? args.w_scales : nullptr;
    of_row = from != nullptr && row < args.n ? __ldg(from + row) : 0.0f;
    if (Shape::kScaled && thread < m) of_token = __ldcg(args.x_scales + thread);
  }
  __device__ void store() const {
    const int thread = static_cast<int>(threadIdx.x);
    if (Shape::kScaled || thread < Shape::kRows) memory[thread] = of_row;
    if (Shape::kScaled && thread < Shape::kTokens) memory[2 * Shape::kRows + thread] = of_token;
  }

  /// p[i] belongs to row `row` + i of the tile; rows are multiples of 8.
  __device__ void apply(float (&p)[8], int row, int token) const {
    float bias[8];
    read(bias, row);
    if constexpr (Shape::kScaled) {
      const float x_scale = memory[2 * Shape::kRows + token];
      float w_scale[8];
      read(w_scale, Shape::kRows + row);
#pragma unroll
      for (int i = 0; i < 8; ++i) p[i] *= w_scale[i] * x_scale;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] += bias[i];
  }

 private:
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
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.y) + at) = skinny_pack(p);
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
    factors.apply(p, 64 * warpgroup() + row8, token);
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
      auto* y = static_cast<__nv_bfloat16*>(args.y) + static_cast<std::size_t>(token) * (args.n / 2);
      *reinterpret_cast<uint4*>(y + (row64() + row16) / 2) = skinny_pack(gate);
    }
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
