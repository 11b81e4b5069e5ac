#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "aotllm/model_runner.h"
#include "aotllm/sampling_params.h"

namespace aotllm {

/// What of `params` a token is drawn with, in the precision in which all targets and the host draw. What is on in
/// double precision stays on when it is rounded.
inline RowSampling row_sampling(const SamplingParams& params) {
  RowSampling row;
  row.temperature = static_cast<float>(params.temperature);
  if (params.temperature > 0.0) row.temperature = std::max(row.temperature, std::numeric_limits<float>::min());
  row.top_k = params.top_k;
  row.top_p = static_cast<float>(params.top_p);
  if (params.top_p < 1.0) row.top_p = std::min(row.top_p, std::nextafter(1.0F, 0.0F));
  row.min_p = static_cast<float>(params.min_p);
  return row;
}

}  // namespace aotllm
