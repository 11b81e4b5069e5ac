#pragma once

#include <string>
#include <vector>

#include "aotllm/engine.h"
#include "aotllm/tuned_linear.h"

namespace aotllm {

struct TunerOptions {
  int device = 0;
  std::string cublaslt;  ///< as CudaRunnerOptions
};

/// Times every kernel that takes the matrices of `engine` (of target cuda) on the GPU, at powers of two rows up to
/// max_num_tokens. Weights and inputs are made up; no weight of the engine is copied. Takes some seconds per shape.
/// Throws as CudaRunner does.
std::vector<TunedLinear> tune(const Engine& engine, const TunerOptions& options);

}  // namespace aotllm
