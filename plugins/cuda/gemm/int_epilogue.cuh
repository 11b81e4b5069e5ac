#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "gemm/int_gemm.h"

// From accumulators to y. A warp has 16 rows of W from `row16` on: thread `lane` holds rows row16 + lane / 4 + 8h of
// tokens 8j + 2 (lane % 4) + b in acc[4j + 2h + b], h, b ∈ {0, 1}. y is contiguous along rows, so pairs of tokens are
// turned into pairs of rows by transposing 8 × 8 matrices of bf16 between the threads of a warp.
namespace aotllm::cuda {

/// [8 rows][8 tokens], two tokens of row lane / 4 in a thread, to two rows of token lane / 4; and back.
__device__ inline std::uint32_t int_transpose(std::uint32_t pair) {
  std::uint32_t transposed;
  cute::SM75_U32x1_MOVM_T::copy(pair, transposed);
  return transposed;
}

__device__ inline std::uint32_t int_pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

__device__ inline float int_activate(float x, Activation activation) {
  if (activation == Activation::kSilu) return x / (1.0f + __expf(-x));
  const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x - x / (1.0f + __expf(2.0f * inner));  // x / 2 · (1 + tanh(inner))
}

/// What the epilogue of a warp's 16 rows reads for up to 32 tokens, loaded all at once: y may be the residual, so that
/// the compiler could not move loads over stores.
template <int kTokens>
struct IntOperands {
  static constexpr int kGroups = kTokens < 32 ? kTokens / 8 : 4;  // of 8 tokens
  float bias[2];
  std::uint32_t residual[kGroups][2];  // rows row16 + 8h + 2 (lane % 4) + {0, 1} of token 8j + lane / 4

  /// Of the groups of 8 tokens base … base + kGroups - 1 that lie in [first, last).
  __device__ void load(const IntArgs& args, int row16, int base, int first, int last, int m) {
    if (row16 >= args.n) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row16 + lane / 4 + 8 * h;
      bias[h] = args.bias != nullptr ? __ldg(args.bias + row) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int token8 = 8 * (base + j);
      if (base + j < first || base + j >= last || token8 >= m) continue;
      if (args.epilogue == Epilogue::kResidual) {
        const int token = token8 + lane / 4;
        const auto* row = args.residual + static_cast<std::size_t>(token) * args.n + row16 + 2 * (lane % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          residual[j][h] = token < m ? __ldcg(reinterpret_cast<const std::uint32_t*>(row + 8 * h)) : 0;
        }
      }
    }
  }
};

/// Writes tokens 8j … 8j + 7 of the warp's rows; p[h][b] is the finished product.
inline __device__ void int_store(const IntArgs& args, float (&p)[2][2], const std::uint32_t (&residual)[2], int j,
                                 int row16, int m) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (args.epilogue == Epilogue::kLogits) {
    auto* y = static_cast<float*>(args.y);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int token = 8 * j + 2 * (lane % 4) + b;
      if (token >= m) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float logit = args.softcap > 0.0f ? args.softcap * tanhf(p[h][b] / args.softcap) : p[h][b];
        y[static_cast<std::size_t>(token) * args.n + row16 + lane / 4 + 8 * h] = logit;
      }
    }
    return;
  }
  const int token = 8 * j + lane / 4;
  auto* y = static_cast<__nv_bfloat16*>(args.y);
  if (args.epilogue == Epilogue::kGated) {
    const std::uint32_t pair = int_transpose(
        int_pack(int_activate(p[0][0], args.activation) * p[1][0], int_activate(p[0][1], args.activation) * p[1][1]));
    y += static_cast<std::size_t>(token) * (args.n / 2) + row16 / 2 + 2 * (lane % 4);
    if (token < m) *reinterpret_cast<std::uint32_t*>(y) = pair;
    return;
  }
  y += static_cast<std::size_t>(token) * args.n + row16 + 2 * (lane % 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (args.epilogue == Epilogue::kResidual) {
      const std::uint32_t tokens = int_transpose(residual[h]);
      const float2 add = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(tokens));
      p[h][0] += add.x;
      p[h][1] += add.y;
    }
    const std::uint32_t pair = int_transpose(int_pack(p[h][0], p[h][1]));
    if (token < m) *reinterpret_cast<std::uint32_t*>(y + 8 * h) = pair;
  }
}

/// y of the groups of 8 tokens in [first, last) that `operands`, loaded with base kBase, is of.
template <int kBase, int kTokens>
__device__ void int_epilogue(const IntArgs& args, const float (&acc)[kTokens / 2], const IntOperands<kTokens>& operands,
                             int row16, int first, int last, int m) {
  if (row16 >= args.n) return;
#pragma unroll
  for (int j = 0; j < operands.kGroups; ++j) {
    if (kBase + j < first || kBase + j >= last || 8 * (kBase + j) >= m) continue;
    float p[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        p[h][b] = acc[4 * (kBase + j) + 2 * h + b] + operands.bias[h];
      }
    }
    int_store(args, p, operands.residual[j], kBase + j, row16, m);
  }
}

}  // namespace aotllm::cuda
