#pragma once

#include <string>
#include <vector>

#include "aotllm/engine.h"

namespace aotllm {

/// The fastest kernel for matrices of one format and shape, by number of rows.
struct TunedLinear {
  struct Choice {
    int max_rows = 0;
    std::string kernel;
    double seconds = 0.0;  ///< at max_rows rows, weights from memory
  };
  std::string format;
  int n = 0;
  int k = 0;
  std::vector<Choice> choices;  ///< by max_rows, ascending
};

struct TunerOptions {
  int device = 0;
  std::string cublaslt;  ///< as CudaRunnerOptions
};

/// Times every kernel that takes the matrices of `engine` (of target cuda) on the GPU, at powers of two rows up to
/// max_num_tokens. Weights and inputs are made up; no weight of the engine is copied. Takes some seconds per shape.
/// Throws as CudaRunner does.
std::vector<TunedLinear> tune(const Engine& engine, const TunerOptions& options);

}  // namespace aotllm
