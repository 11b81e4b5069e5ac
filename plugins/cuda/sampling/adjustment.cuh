#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

#include "sampling/row_split.cuh"
#include "sampling/sampling.h"

namespace aotllm::cuda {

/// What becomes of the logits of a row before a token is chosen: first the grammar mask, then the penalties.
struct Adjustment {
  const std::uint32_t* allowed = nullptr;  // [⌈vocab_size / 32⌉], null = all
  const std::uint32_t* counts = nullptr;   // [vocab_size], null = no penalties
  RowPenalties penalties;

  __device__ std::uint32_t operator()(std::uint32_t key, int id) const {
    if (allowed != nullptr && (allowed[id / 32] >> (id % 32) & 1U) == 0) return kMinusInfinity;
    if (counts == nullptr || counts[id] == 0 || !is_finite_key(key)) return key;
    return key_of(penalized(logit_of(key), counts[id] & ~kSeenInPrompt));
  }

 private:
  /// As `Penalties` on the CPU: each operation rounds by itself.
  __device__ float penalized(float logit, std::uint32_t times_generated) const {
    double value = logit;
    value = value > 0.0 ? __ddiv_rn(value, penalties.repetition) : __dmul_rn(value, penalties.repetition);
    if (times_generated > 0) {
      value = __dsub_rn(value, __dadd_rn(__dmul_rn(penalties.frequency, times_generated), penalties.presence));
    }
    constexpr double kLargest = FLT_MAX;
    return static_cast<float>(fmin(fmax(value, -kLargest), kLargest));
  }
};

}  // namespace aotllm::cuda
