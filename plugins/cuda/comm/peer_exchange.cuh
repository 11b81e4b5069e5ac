#pragma once

#include <cstdint>

#include "comm/peer_kernels.h"
#include "elementwise/bf16x8.cuh"

// How ranks wait for each other. Block b of a rank only ever reads what blocks b of its peers have written, so a flag
// for each pair of a block and a rank orders everything, and no block waits for its neighbours.
//
// Call c (a counter in device memory, so that a graph that is replayed counts on) stages into slot c mod 2. A rank that
// is past the first wait of call c knows that all peers have begun call c, hence ended call c - 1: slot c + 1 mod 2,
// which call c - 1 used, is free for call c + 1. Every kernel has that wait, so nobody is more than one call ahead.
namespace aotllm::cuda {

inline constexpr int kPeerThreads = 512;
inline constexpr std::uint64_t kPatience = 10'000'000'000;  // ns
inline constexpr int kPollsPerLook = 256;                   // at the clock and the host's word

__device__ inline void store_release(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ inline std::uint32_t load_acquire(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The call that this kernel is, the same in all of its threads.
__device__ inline std::uint32_t begin_call(const PeerView& view) {
  return __ldcg(view.calls + blockIdx.x) + 1;
}

__device__ inline void end_call(const PeerView& view, std::uint32_t call) {
  __syncthreads();  // all threads have read the counter
  if (threadIdx.x == 0) view.calls[blockIdx.x] = call;
}

// Tells all peers that this block is here, with all that its threads have written, and waits for theirs. Thread r deals
// with rank r: the barrier before puts the block's writes before its release, that after its acquire before their
// reads.
__device__ inline void exchange(const PeerView& view, int phase, std::uint32_t call) {
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < view.size && peer != view.rank) {
    const int row = (phase * kMaxPeerBlocks + static_cast<int>(blockIdx.x)) * kMaxPeerRanks;
    store_release(view.flags[peer] + row + view.rank, call);
    const std::uint32_t* flag = view.flags[view.rank] + row + peer;
    const std::uint64_t begin = nanoseconds();
    // Of counters that wrap around, the peer's is the later one: it may be a call ahead.
    for (int polls = 0; static_cast<std::int32_t>(load_acquire(flag) - call) < 0; ++polls) {
      if (polls % kPollsPerLook != kPollsPerLook - 1) continue;
      if (*reinterpret_cast<const volatile std::uint32_t*>(view.aborted) != 0) break;
      if (nanoseconds() - begin > kPatience) __trap();  // an error, where waiting on would be a hang
    }
  }
  __syncthreads();
}

__device__ inline uint4* vector_of(__nv_bfloat16* base, std::int64_t v) {
  return reinterpret_cast<uint4*>(base) + v;
}

// Vector v of the result, from the slots of all ranks.
template <int kRanks>
__device__ inline uint4 reduce(const PeerView& view, const AllReduceArgs& args, std::size_t slot, std::int64_t v) {
  uint4 packed[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) packed[r] = __ldcg(vector_of(view.staging[r] + slot, v));
  float sum[8];
  unpack(packed[0], sum);
#pragma unroll
  for (int r = 1; r < kRanks; ++r) {
    float addend[8];
    unpack(packed[r], addend);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] += addend[e];
  }
  if (args.bias != nullptr) {
    float bias[8];
    load_weights(args.bias + v % (args.width / 8) * 8, bias);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] += bias[e];
  }
  if (args.residual != nullptr) {
    float residual[8];
    unpack(load_activation(args.residual + v * 8), residual);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] += residual[e];
  }
  return pack_bf16(sum);
}

}  // namespace aotllm::cuda
