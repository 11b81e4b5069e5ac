#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/fast_math.h>

#include <type_traits>

#include "attention/context_attention_config.cuh"

// What a consumer does between the two products. A thread of a warpgroup holds rows `row` and `row + 8` of an
// accumulator [64, n]: element 4j + 2i + c is row 16 · warp + lane / 4 + 8i, column 8j + 2 · (lane % 4) + c.
namespace aotllm::cuda::context {

__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Two numbers as bf16 or fp16.
template <class Element>
__device__ std::uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<Element, cute::half_t>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

/// Scores of keys that a query does not see become −∞. `query` is the position of the thread's first row, `key` that of
/// its first column.
template <int size>
__device__ void mask_scores(float* scores, int query, int key, int window) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int last = query + 8 * i - key;
    const int first = window > 0 ? last - window + 1 : -(1 << 30);
#pragma unroll
    for (int j = 0; j < size / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * j + c;
        float& score = scores[4 * j + 2 * i + c];
        score = column > last || column < first ? -INFINITY : score;
      }
    }
  }
}

/// tanh.approx is within 2^-11 of its result, relatively: a capped score is off by up to softcap / 2048.
template <int size>
__device__ void cap_scores(float* scores, float scale) {
#pragma unroll
  for (int i = 0; i < size; ++i) scores[i] = cutlass::fast_tanh(scores[i] * scale);
}

/// Online softmax of the two rows of a thread.
class Softmax {
 public:
  /// Turns scores into exp2(scale · (score − maximum)) and returns by how much what was summed so far is to be scaled.
  template <int size>
  __device__ float2 step(float* scores, float scale) {
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float maximum = maximum_[i];
#pragma unroll
      for (int j = 0; j < size / 4; ++j) {
        maximum = fmaxf(maximum, fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
      }
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
      // A maximum that lags a little costs no accuracy and saves most rescalings. −∞ never lags: ∞ and NaN compare
      // false.
      if ((maximum - maximum_[i]) * scale <= kMaxLag) maximum = maximum_[i];
      const float offset = maximum == -INFINITY ? 0.0f : maximum * scale;  // −∞: nothing seen yet
      // Exactly 1 where the maximum stays, whatever a fused multiply-add makes of the difference: how many steps a row
      // is masked in depends on the tile that it is in, and must not show in its bits.
      factors[i] = maximum == maximum_[i] ? 1.0f : exp2_approximate(maximum_[i] * scale - offset);
      maximum_[i] = maximum;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < size / 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[4 * j + 2 * i + c];
          score = exp2_approximate(score * scale - offset);
          sum += score;
        }
      }
      sum_[i] = sum_[i] * factors[i] + sum;
    }
    return {factors[0], factors[1]};
  }

  /// 1 / sum of each row.
  __device__ float2 finish() {
#pragma unroll
    for (float& sum : sum_) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
    }
    return {1.0f / sum_[0], 1.0f / sum_[1]};
  }

 private:
  static constexpr float kMaxLag = 8.0f;  // in exponents of 2

  float maximum_[2] = {-INFINITY, -INFINITY};
  float sum_[2] = {0.0f, 0.0f};  // of this thread's columns
};

/// Multiplies the rows of an accumulator; a factor of one changes no bit, so a warp may leave it out.
template <int size>
__device__ void scale_rows(float* values, float2 factors) {
#pragma unroll
  for (int i = 0; i < size; ++i) values[i] *= i % 4 < 2 ? factors.x : factors.y;
}

/// Writes a warp's rows [0, rows) of an accumulator [64, size · 2] as bf16. `out` is the thread's first row in [m,
/// stride]. Four lanes hold 4 bytes each of 16 that are neighbours: they exchange words, so that each writes 16 bytes.
template <int size>
__device__ void store_rows(const float* values, float2 factors, __nv_bfloat16* out, std::int64_t stride, int rows) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float factor = i == 0 ? factors.x : factors.y;
#pragma unroll
    for (int group = 0; group < size / 16; ++group) {
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = values + 4 * (4 * group + j) + 2 * i;
        words[j] = pack_pair<cute::bfloat16_t>(pair[0] * factor, pair[1] * factor);
      }
#pragma unroll
      for (int bit = 1; bit <= 2; bit *= 2) {  // transposes [lane][word]
        const bool upper = (lane & bit) != 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if ((j & bit) != 0) continue;
          const std::uint32_t sent = upper ? words[j] : words[j | bit];
          const std::uint32_t received = __shfl_xor_sync(~0u, sent, bit);
          (upper ? words[j] : words[j | bit]) = received;
        }
      }
      if (8 * i < rows) {
        *reinterpret_cast<uint4*>(out + 8 * i * stride + 32 * group + 8 * lane) =
            uint4{words[0], words[1], words[2], words[3]};
      }
    }
  }
}

}  // namespace aotllm::cuda::context
