#pragma once

#include <string>
#include <vector>

namespace aotllm {

/// The fastest kernel for matrices of one format and shape, by number of rows.
struct TunedLinear {
  struct Choice {
    int max_rows = 0;
    std::string kernel;
    double seconds = 0.0;  ///< at max_rows rows, weights from where they come from in a step
  };
  std::string format;
  int n = 0;
  int k = 0;
  std::vector<Choice> choices;  ///< by max_rows, ascending
};

}  // namespace aotllm
