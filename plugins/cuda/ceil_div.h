#pragma once

namespace aotllm::cuda {

/// ⌈a / b⌉ for a ≥ 0, b > 0.
constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

}  // namespace aotllm::cuda
