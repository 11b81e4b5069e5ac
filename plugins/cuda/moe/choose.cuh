#pragma once

#include <climits>
#include <cmath>

#include "moe/moe.h"

// Of one row: the softmax over all experts, and the largest top_k. A warp works on a row, lane l holds experts l + 32
// i.
namespace aotllm::cuda::moe {

inline constexpr unsigned kFullMask = 0xFFFFFFFFu;

/// An expert of a row in each lane below top_k, in no order; `slot` is its rank by id.
struct Choice {
  int expert;
  float weight;
  int slot;
};

/// Unsigned numbers in the order of the floats, 0 for NaN; both zeros are one.
__device__ inline unsigned order_of(float value) {
  const unsigned bits = __float_as_uint(value + 0.0f);
  if (isnan(value)) return 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

/// logits [num_experts ≤ 32 kEach] of the row. Of equal ones the lower expert is taken first.
template <int kEach>
__device__ inline Choice choose(const float* logits, int num_experts, int top_k, bool normalize) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float values[kEach];
  unsigned orders[kEach];  // 0: none, or taken
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool is_one = 32 * i + lane < num_experts;
    values[i] = is_one ? __ldcg(logits + 32 * i + lane) : -INFINITY;
    orders[i] = is_one ? max(order_of(values[i]), 1u) : 0u;
    largest = fmaxf(largest, values[i]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) total += expf(values[i] - largest);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kFullMask, total, step);

  Choice mine{INT_MAX, 0.0f, 0};
  for (int slot = 0; slot < top_k; ++slot) {
    unsigned best = 0;
    int expert = INT_MAX;
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (orders[i] > best) best = orders[i], expert = 32 * i + lane, value = values[i];
    }
    const unsigned most = __reduce_max_sync(kFullMask, best);
    const int chosen = __reduce_min_sync(kFullMask, best == most ? expert : INT_MAX);
    value = __shfl_sync(kFullMask, value, chosen % 32);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (32 * i + lane == chosen) orders[i] = 0;
    }
    if (lane == slot) mine = {chosen, expf(value - largest), 0};
  }
  if (normalize) {
    total = 0.0f;
    for (int slot = 0; slot < top_k; ++slot) total += __shfl_sync(kFullMask, mine.weight, slot);
  }
  mine.weight /= total;
  for (int slot = 0; slot < top_k; ++slot) mine.slot += __shfl_sync(kFullMask, mine.expert, slot) < mine.expert;
  return mine;
}

}  // namespace aotllm::cuda::moe
