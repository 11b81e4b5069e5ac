#include "comm/sum_slices.h"

#include <algorithm>

#include "elementwise/bf16x8.cuh"

namespace aotllm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 1024;

__global__ void __launch_bounds__(kThreads) sum_slices_kernel(const SliceSum slice, const AllReduceArgs args) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < slice.count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    float sum[8] = {};
    for (int r = 0; r < slice.size; ++r) {
      float addend[8];
      unpack(load_activation(slice.addends + (r * slice.stride + i) * 8), addend);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] = r == 0 ? addend[e] : sum[e] + addend[e];
    }
    const std::int64_t v = slice.begin + i;
    float added[8];
    if (args.bias != nullptr) {
      load_weights(args.bias + v % (args.width / 8) * 8, added);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] += added[e];
    }
    if (args.residual != nullptr) {
      unpack(load_activation(args.residual + v * 8), added);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] += added[e];
    }
    reinterpret_cast<uint4*>(slice.out)[i] = pack_bf16(sum);
  }
}

}  // namespace

void sum_slices(const SliceSum& slice, const AllReduceArgs& args, const Stream& stream) {
  if (slice.count <= 0) return;
  const auto blocks = static_cast<unsigned>(std::min((slice.count + kThreads - 1) / kThreads, kMaxBlocks));
  launch(sum_slices_kernel, dim3(blocks), dim3(kThreads), 0, stream, slice, args);
}

}  // namespace aotllm::cuda
