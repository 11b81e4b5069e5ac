#pragma once

#include <limits>

#include "group_codes.h"

namespace aotllm::cuda {

/// The scale of a group whose largest magnitude is `largest`, and what its values are multiplied by. A scale is finite
/// whatever the values are: loads of whole stages read scales beyond the last column, which zeros are multiplied by.
struct GroupScale {
  float scale;
  float inverse;

  __device__ explicit GroupScale(float largest) {
    const float finite = fminf(largest, std::numeric_limits<float>::max());
    scale = finite * (1.0f / kCodeMax);
    inverse = finite > 0.0f ? kCodeMax / finite : 0.0f;
  }
};

}  // namespace aotllm::cuda
