#pragma once

#include "elementwise/elementwise.h"

namespace aotllm::cuda {

/// How a block shares a row: `threads` threads of `vectors` · 8 values each. A row's sum is taken in an order that
/// depends on the plan, so the plan depends on the width alone and never on the number of rows.
struct RmsNormPlan {
  int vectors = 1;  ///< 1, 2, 4 or 8
  int threads = 0;  ///< a multiple of 32, at most 512; vectors · threads · 8 ≥ width
};

/// The plan that `rms_norm` uses.
RmsNormPlan plan_rms_norm(int width);
/// A plan of `vectors` for this width; threads is 0 where it would need more than 512.
RmsNormPlan rms_norm_plan_of(int width, int vectors);

/// `rms_norm` with a given plan: what tests and benchmarks compare.
void rms_norm(const RmsNormArgs& args, const RmsNormPlan& plan, const Stream& stream);

}  // namespace aotllm::cuda
