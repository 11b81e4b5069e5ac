#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "comm/communicator.h"
#include "launch.h"

namespace aotllm::cuda {

/// The result of an all_reduce at vectors [begin, begin + count) of 8 elements: `addends` [size, stride · 8] holds
/// those of each rank there, `out` [count · 8] takes them. Of `args`, bias, residual and width are used.
struct SliceSum {
  const __nv_bfloat16* addends = nullptr;
  std::int64_t stride = 0;  ///< vectors
  std::int64_t begin = 0;
  std::int64_t count = 0;
  int size = 0;
  __nv_bfloat16* out = nullptr;
};
void sum_slices(const SliceSum& slice, const AllReduceArgs& args, const Stream& stream);

}  // namespace aotllm::cuda
