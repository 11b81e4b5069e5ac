#pragma once

#include "gemm/gemm.h"

namespace aotllm::cuda {

/// act(x) of Epilogue::kGated, in float32 to about 1e-6.
__device__ inline float activate(float x, Activation activation) {
  if (activation == Activation::kSilu) return x / (1.0f + __expf(-x));
  const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x - x / (1.0f + __expf(2.0f * inner));  // x / 2 · (1 + tanh(inner))
}

}  // namespace aotllm::cuda
