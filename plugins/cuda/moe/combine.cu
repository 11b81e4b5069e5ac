#include <string>

#include "aotllm/errors.h"
#include "elementwise/bf16x8.cuh"
#include "moe/moe.h"

namespace aotllm::cuda {
namespace {

constexpr int kThreads = 128;

// Grid: (rows, chunks of kThreads vectors of a row). Outputs of kTogether slots are loaded at a time.
template <int kTogether>
__global__ void __launch_bounds__(kThreads) combine_kernel(const MoeCombineArgs args) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const auto row = static_cast<std::size_t>(blockIdx.x);
  const int column = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * 8;
  if (column >= args.width) return;
  const std::int32_t* places = args.routing.places + row * args.top_k;
  const float* weights = args.routing.weights + row * args.top_k;
  float sum[8] = {};
  uint4 residual{};
  if (args.residual != nullptr) residual = load_activation(args.residual + row * args.width + column);
  for (int first = 0; first < args.top_k; first += kTogether) {
    uint4 values[kTogether];
    float shares[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const bool is_one = first + i < args.top_k;
      const int place = is_one ? __ldcg(places + first + i) : 0;
      shares[i] = is_one ? __ldcg(weights + first + i) : 0.0f;
      values[i] = is_one ? load_activation(args.y + static_cast<std::size_t>(place) * args.width + column) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      float unpacked[8];
      unpack(values[i], unpacked);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] += shares[i] * unpacked[e];
    }
  }
  float added[8];
  unpack(residual, added);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += added[i];
  *reinterpret_cast<uint4*>(args.out + row * args.width + column) = pack_bf16(sum);
}

}  // namespace

void moe_combine(const MoeCombineArgs& args, const Stream& stream) {
  if (args.width <= 0 || args.width % 8 != 0) {
    throw Error(ErrorKind::kInternal,
                "moe_combine: width " + std::to_string(args.width) + " is not a positive multiple of 8");
  }
  if (args.m <= 0) return;
  const dim3 grid(static_cast<unsigned>(args.m), static_cast<unsigned>((args.width / 8 + kThreads - 1) / kThreads));
  const auto kernel = args.top_k <= 2 ? combine_kernel<2> : args.top_k <= 4 ? combine_kernel<4> : combine_kernel<8>;
  launch(kernel, grid, dim3(kThreads), 0, stream, args);
}

}  // namespace aotllm::cuda
