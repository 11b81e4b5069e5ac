#include "attention/copy_blocks.h"

#ifndef CUTLASS_ENABLE_GDC_FOR_SM90
#define CUTLASS_ENABLE_GDC_FOR_SM90
#endif
#include <cutlass/arch/grid_dependency_control.h>

#include <algorithm>
#include <string>

#include "aotllm/errors.h"

namespace aotllm::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;  ///< of 16 bytes, in flight per thread
constexpr std::size_t kPartBytes = std::size_t{kThreads} * kVectors * sizeof(uint4);
constexpr int kMaxGridZ = 65535;

/// Grid (part of a block, layer, copy).
__global__ void __launch_bounds__(kThreads) copy_blocks_kernel(const __grid_constant__ CopyKvBlocksArgs args) {
  cutlass::arch::launch_dependent_grids();
  cutlass::arch::wait_on_dependent_grids();
  std::uint8_t* layer = args.layers[blockIdx.y];
  const std::size_t vectors = args.block_bytes / sizeof(uint4);
  const std::size_t first = static_cast<std::size_t>(blockIdx.x) * kThreads * kVectors + threadIdx.x;
  for (int i = static_cast<int>(blockIdx.z); i < args.num_copies; i += static_cast<int>(gridDim.z)) {
    const KvBlockCopy copy = args.copies[i];
    if (copy.from < 0 || copy.from == copy.to) continue;
    const auto* from = reinterpret_cast<const uint4*>(layer + static_cast<std::size_t>(copy.from) * args.block_stride);
    auto* to = reinterpret_cast<uint4*>(layer + static_cast<std::size_t>(copy.to) * args.block_stride);
    uint4 values[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * kThreads < vectors) values[v] = from[first + v * kThreads];
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * kThreads < vectors) to[first + v * kThreads] = values[v];
    }
  }
}

}  // namespace

void copy_kv_blocks(const CopyKvBlocksArgs& args, const Stream& stream) {
  if (args.num_copies <= 0 || args.num_layers <= 0 || args.block_bytes == 0) return;
  if (args.block_bytes % sizeof(uint4) != 0 || args.block_stride % sizeof(uint4) != 0) {
    throw Error(ErrorKind::kInternal, "copy of KV blocks: " + std::to_string(args.block_bytes) + " bytes, " +
                                          std::to_string(args.block_stride) + " apart: multiples of 16 are needed");
  }
  const auto parts = static_cast<unsigned>((args.block_bytes + kPartBytes - 1) / kPartBytes);
  const dim3 grid(parts, static_cast<unsigned>(args.num_layers),
                  static_cast<unsigned>(std::min(args.num_copies, kMaxGridZ)));
  launch(copy_blocks_kernel, grid, dim3(kThreads), 0, stream, args);
}

}  // namespace aotllm::cuda
