#include "comm/peer_kernels.h"

#include <string>

#include "aotllm/errors.h"
#include "chain.cuh"
#include "comm/peer_exchange.cuh"

namespace aotllm::cuda {
namespace {

constexpr int kUnrolled = 4;

// Tiles of kPeerThreads vectors are dealt out to blocks in turn, and with two shots rounds of tiles to ranks. A thread
// has the same vectors in all loops, so that `out` may be the memory that is read.
template <int kRanks, bool kTwoShots>
__global__ void __launch_bounds__(kPeerThreads) all_reduce_kernel(const PeerView view, const AllReduceArgs args) {
  release_successor();
  wait_for_predecessor();
  const std::uint32_t call = begin_call(view);
  const std::size_t slot = call % 2 * view.capacity;
  const std::int64_t vectors = static_cast<std::int64_t>(args.rows) * (args.width / 8);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kPeerThreads + threadIdx.x;
  const std::int64_t step = std::int64_t{view.blocks} * kPeerThreads;
  __nv_bfloat16* mine = view.staging[view.rank] + slot;
  for (std::int64_t v = first; v < vectors; v += step) {
    __stcg(vector_of(mine, v), load_activation(args.partial + v * 8));
  }
  exchange(view, 0, call);
  if constexpr (!kTwoShots) {
    // Reads over a link take long: several are under way.
    std::int64_t v = first;
    for (; v + (kUnrolled - 1) * step < vectors; v += kUnrolled * step) {
      uint4 sums[kUnrolled];
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) sums[u] = reduce<kRanks>(view, args, slot, v + u * step);
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) *vector_of(args.out, v + u * step) = sums[u];
    }
    for (; v < vectors; v += step) *vector_of(args.out, v) = reduce<kRanks>(view, args, slot, v);
  } else {
    // The sum takes the place of this rank's own addend, which no other rank reads there.
    for (std::int64_t v = first + view.rank * step; v < vectors; v += kRanks * step) {
      const uint4 sum = reduce<kRanks>(view, args, slot, v);
      __stcg(vector_of(mine, v), sum);
      *vector_of(args.out, v) = sum;
    }
    exchange(view, 1, call);
    for (std::int64_t round = first; round < vectors; round += kRanks * step) {
      uint4 fetched[kRanks];
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        const std::int64_t v = round + r * step;
        if (r != view.rank && v < vectors) fetched[r] = __ldcg(vector_of(view.staging[r] + slot, v));
      }
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        const std::int64_t v = round + r * step;
        if (r != view.rank && v < vectors) *vector_of(args.out, v) = fetched[r];
      }
    }
  }
  end_call(view, call);
}

// The first wait tells that rank 0 is done with what was gathered before, the second one that all is there.
__global__ void __launch_bounds__(kPeerThreads) gather_kernel(const PeerView view, const GatherArgs args) {
  release_successor();
  wait_for_predecessor();
  const std::uint32_t call = begin_call(view);
  exchange(view, 0, call);
  const int width = args.columns / 4;
  const std::int64_t vectors = static_cast<std::int64_t>(args.rows) * width;
  const float4* from = reinterpret_cast<const float4*>(args.part);
  float4* to = reinterpret_cast<float4*>(view.gathered);
  for (std::int64_t v = static_cast<std::int64_t>(blockIdx.x) * kPeerThreads + threadIdx.x; v < vectors;
       v += std::int64_t{view.blocks} * kPeerThreads) {
    const std::int64_t row = v / width;
    to[(row * view.size + view.rank) * width + v % width] = __ldcg(from + v);
  }
  exchange(view, 1, call);
  end_call(view, call);
}

using Kernel = void (*)(PeerView, AllReduceArgs);

template <int kRanks>
Kernel choose(bool two_shots) {
  return two_shots ? Kernel(all_reduce_kernel<kRanks, true>) : Kernel(all_reduce_kernel<kRanks, false>);
}

Kernel choose_kernel(int size, bool two_shots) {
  switch (size) {
    case 2:
      return choose<2>(two_shots);
    case 3:
      return choose<3>(two_shots);
    case 4:
      return choose<4>(two_shots);
    case 5:
      return choose<5>(two_shots);
    case 6:
      return choose<6>(two_shots);
    case 7:
      return choose<7>(two_shots);
    case 8:
      return choose<8>(two_shots);
    default:
      throw Error(ErrorKind::kInternal, "all_reduce: " + std::to_string(size) + " ranks");
  }
}

}  // namespace

void peer_all_reduce(const PeerView& view, const AllReduceArgs& args, bool two_shots, const Stream& stream) {
  launch(choose_kernel(view.size, two_shots), dim3(view.blocks), dim3(kPeerThreads), 0, stream, view, args);
}

void peer_gather(const PeerView& view, const GatherArgs& args, const Stream& stream) {
  launch(gather_kernel, dim3(view.blocks), dim3(kPeerThreads), 0, stream, view, args);
}

void load_peer_kernels(int size) {
  cudaFuncAttributes attributes{};
  for (const bool two_shots : {false, true}) {
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(choose_kernel(size, two_shots))),
          "load of a kernel");
  }
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(gather_kernel)), "load of a kernel");
}

}  // namespace aotllm::cuda
