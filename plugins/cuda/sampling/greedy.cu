#include <algorithm>
#include <cstdint>

#include "chain.cuh"
#include "sampling/row_split.cuh"
#include "sampling/sampling.h"
#include "sampling/team.cuh"

namespace aotllm::cuda {
namespace {

/// The best token of a thread, then of more and more of them: the largest logit, the lowest id among equals.
struct Best {
  float logit = -INFINITY;
  std::int32_t id = INT32_MAX;
  bool damaged = false;  // a logit is NaN or +inf

  __device__ void take(float other, std::int32_t other_id) {  // in order of ids
    damaged |= !(other < INFINITY);
    if (other > logit) {
      logit = other;
      id = other_id;
    }
  }
  /// A number that is the larger, the better the token is; the largest of all where a logit is damaged.
  __device__ std::uint64_t rank() const {
    if (damaged) return ~std::uint64_t{0};
    return static_cast<std::uint64_t>(key_of(logit)) << 32 | ~static_cast<std::uint32_t>(id);
  }
};

/// Rank as above → token.
__device__ std::int32_t token_of(std::uint64_t rank) {
  const auto key = static_cast<std::uint32_t>(rank >> 32);  // above all others where a logit is damaged
  return is_finite_key(key) ? static_cast<std::int32_t>(~static_cast<std::uint32_t>(rank)) : no_token(key);
}

/// Best token of a block's part of `row`.
template <int kBlocks, int kThreads>
__device__ Best best_of_part(const float* row, int vocab_size, int block) {
  const int thread = static_cast<int>(threadIdx.x);
  const RowSplit split(row, vocab_size, block, kBlocks);
  Best best;
  if (block == 0 && thread < split.head) best.take(row[thread], thread);
  constexpr int kBatch = 4;  // loads in flight
  const float4* body = reinterpret_cast<const float4*>(row + split.head);
  int unit = split.begin + thread;
  const auto take = [&](const float4& logits, int at) {
    const int id = split.head + 4 * at;
    best.take(logits.x, id);
    best.take(logits.y, id + 1);
    best.take(logits.z, id + 2);
    best.take(logits.w, id + 3);
  };
  for (; unit + (kBatch - 1) * kThreads < split.end; unit += kBatch * kThreads) {
    float4 logits[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) logits[i] = __ldcs(body + unit + i * kThreads);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) take(logits[i], unit + i * kThreads);
  }
  float4 rest[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (unit + i * kThreads < split.end) rest[i] = __ldcs(body + unit + i * kThreads);
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (unit + i * kThreads < split.end) take(rest[i], unit + i * kThreads);
  }
  const int tail = split.tail() + thread;
  if (block == kBlocks - 1 && tail < vocab_size) best.take(row[tail], tail);
  return best;
}

/// One cluster of kBlocks for each row.
template <int kBlocks, int kThreads>
__global__ void AOTLLM_BLOCKS_OF_ROW(kBlocks) __launch_bounds__(kThreads) greedy_kernel(const SamplingArgs args) {
  constexpr int kWarps = kThreads / 32;
  __shared__ std::uint64_t of_warps[kWarps];
  __shared__ std::uint64_t of_blocks[kBlocks];
  using Cluster = Team<kBlocks>;
  release_successor();
  Cluster::arrive();
  wait_for_predecessor();
  const int block = static_cast<int>(blockIdx.x) % kBlocks;
  const int index = static_cast<int>(blockIdx.x) / kBlocks;
  const float* row = args.logits + static_cast<std::size_t>(index) * args.vocab_size;
  const std::uint64_t rank = warp_max(best_of_part<kBlocks, kThreads>(row, args.vocab_size, block).rank());
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = rank;
  __syncthreads();
  std::uint64_t best = 0;
  if (threadIdx.x < 32) best = warp_max(threadIdx.x < kWarps ? of_warps[threadIdx.x] : 0);
  if constexpr (kBlocks > 1) {
    Cluster::wait();  // all blocks run, so that their memory is there
    if (threadIdx.x == 0) *Cluster::map_shared_rank(&of_blocks[block], 0) = best;
    Cluster::sync();
    if (block == 0 && threadIdx.x < 32) best = warp_max(threadIdx.x < kBlocks ? of_blocks[threadIdx.x] : 0);
  }
  if (block == 0 && threadIdx.x == 0) args.tokens[index] = token_of(best);
}

template <int kBlocks, int kThreads>
void launch_greedy(const SamplingArgs& args, const Stream& stream) {
  launch(greedy_kernel<kBlocks, kThreads>, dim3(static_cast<unsigned>(args.num_rows) * kBlocks), dim3(kThreads), 0,
         stream, args);
}

}  // namespace

void sample_greedy(const SamplingArgs& args, const Stream& stream) {
  if (args.num_rows == 0) return;
  if (stream.sm < 90) return launch_greedy<1, 1024>(args, stream);
  // Measured: many blocks for each row until all rows together fill the GPU.
  if (args.num_rows <= 24) {
    launch_greedy<8, 1024>(args, stream);
  } else if (args.num_rows <= 128) {
    launch_greedy<2, 1024>(args, stream);
  } else {
    launch_greedy<1, 1024>(args, stream);
  }
}

}  // namespace aotllm::cuda
