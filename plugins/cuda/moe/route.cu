#include <algorithm>
#include <string>

#include "aotllm/errors.h"
#include "elementwise/bf16x8.cuh"
#include "moe/permute.cuh"

namespace aotllm::cuda {
namespace {

using moe::Begin;
using moe::Choice;
using moe::kFullMask;

constexpr int kSlices = 16;           // of k: their sums are added in order, whatever the kernel
constexpr int kFusedRows = 64;        // up to which the last block of the first kernel does all the rest
constexpr int kFewWarps = 16;         // of that kernel
constexpr int kManyWarps = 8;         // of those for many rows
constexpr unsigned kFewBlocks = 128;  // fewer of the larger tiles leave multiprocessors idle
constexpr int kRowBlock = 32;         // rows of a block, for many: a word has a bit for each
constexpr int kBlockThreads = 32 * kRowBlock;

__device__ void mma(const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, float (&d)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// A block's logits: 16 kRowTiles rows × 8 kExpertTiles experts. The tensor cores multiply bf16: a float32 weight is
/// the sum of three of them, so that products are exact. Chunks of 32 along k are dealt out to slices in turn; lane l
/// has elements 8 (l % 4) … + 7 of each, as which of an instruction's columns an element is at does not matter.
template <int kWarps, int kRowTiles, int kExpertTiles>
struct Logits {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kExperts = 8 * kExpertTiles;
  static constexpr int kAddTiles = kRowTiles < 2 ? kRowTiles : 2;  // row tiles whose sums are added at a time
  static constexpr int kAdds = kRowTiles / kAddTiles;
  static constexpr int kAddSize = 16 * kAddTiles * kExperts;
  static constexpr int kEach = (kAddSize + kThreads - 1) / kThreads;       // of them, logits of a thread
  static constexpr int kTogether = kRowTiles * kExpertTiles == 1 ? 4 : 1;  // chunks that are loaded at once
  using Sums = float[kRowTiles][kExpertTiles][4];

  const MoeRouteArgs& args;
  int first_row, first_expert;
  int thread = static_cast<int>(threadIdx.x);
  int warp = thread / 32;
  int lane = thread % 32;

  __device__ explicit Logits(const MoeRouteArgs& a)
      : args(a),
        first_row(static_cast<int>(blockIdx.y) * kRows),
        first_expert(static_cast<int>(blockIdx.x) * kExperts) {}

  /// The block's weights to the L2.
  __device__ void prefetch() const {
    const int lines = (args.width + 31) / 32;
    for (int i = thread; i < kExperts * lines; i += kThreads) {
      const int expert = first_expert + i / lines;
      if (expert >= args.num_experts) break;
      const float* line = args.router + static_cast<std::size_t>(expert) * args.width + i % lines * 32;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }
  }

  __device__ void run() const {
    float totals[kAdds][kEach] = {};
#pragma unroll
    for (int slice = warp; slice < kSlices; slice += kWarps) {
      Sums sums = {};
      sum(slice, sums);
#pragma unroll
      for (int i = 0; i < kAdds; ++i) add(sums, i * kAddTiles, totals[i]);
    }
#pragma unroll
    for (int i = 0; i < kAdds * kEach; ++i) {
      const int at = thread + i % kEach * kThreads;
      const int row = first_row + i / kEach * 16 * kAddTiles + at / kExperts;
      const int expert = first_expert + at % kExperts;
      if (at >= kAddSize || row >= args.m || expert >= args.num_experts) continue;
      __stcg(args.logits + static_cast<std::size_t>(row) * args.num_experts + expert, totals[i / kEach][i % kEach]);
    }
  }

 private:
  __device__ void sum(int slice, Sums& sums) const {
    const int chunks = (args.width + 31) / 32;
#pragma unroll kTogether
    for (int chunk = slice; chunk < chunks; chunk += kSlices) {
      const int k = 32 * chunk + 8 * (lane % 4);
      const bool inside = k < args.width;
      uint4 x[kRowTiles][2];
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        const int row = first_row + 8 * i + lane / 4;
        x[i / 2][i % 2] =
            inside && row < args.m ? load_activation(args.x + static_cast<std::size_t>(row) * args.width + k) : uint4{};
      }
#pragma unroll
      for (int tile = 0; tile < kExpertTiles; ++tile) {
        const int expert = first_expert + 8 * tile + lane / 4;
        float w[8] = {};
        if (inside && expert < args.num_experts) {
          load_weights(args.router + static_cast<std::size_t>(expert) * args.width + k, w);
        }
        multiply(x, w, sums, tile);
      }
    }
  }

  static __device__ void multiply(const uint4 (&x)[kRowTiles][2], float (&w)[8], Sums& sums, int tile) {
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      std::uint32_t b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[i] = pack_bf16x2(w[2 * i], w[2 * i + 1]);
        const float2 taken = unpack_bf16x2(b[i]);
        w[2 * i] -= taken.x;
        w[2 * i + 1] -= taken.y;
      }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        mma({x[r][0].x, x[r][1].x, x[r][0].y, x[r][1].y}, b[0], b[1], sums[r][tile]);
        mma({x[r][0].z, x[r][1].z, x[r][0].w, x[r][1].w}, b[2], b[3], sums[r][tile]);
      }
    }
  }

  /// totals += the warps' sums of some row tiles, in order.
  __device__ void add(const Sums& sums, int first_tile, float (&totals)[kEach]) const {
    __shared__ float shared[kWarps][kAddSize];
    __syncthreads();  // what was added before has been read
#pragma unroll
    for (int r = 0; r < kAddTiles; ++r) {
#pragma unroll
      for (int tile = 0; tile < kExpertTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* pair = &sums[first_tile + r][tile][2 * half];
          const int at = (16 * r + 8 * half + lane / 4) * kExperts + 8 * tile + 2 * (lane % 4);
          *reinterpret_cast<float2*>(&shared[warp][at]) = make_float2(pair[0], pair[1]);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = thread + i * kThreads;
      if (at >= kAddSize) continue;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) totals[i] += shared[w][at];
    }
  }
};

/// The experts of a row, by one warp.
template <int kEach>
__device__ Choice choose_row(const MoeRouteArgs& args, int row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool is_padding = args.sequences != nullptr && __ldcg(args.sequences + row) < 0;
  const float* logits = args.logits + static_cast<std::size_t>(is_padding ? 0 : row) * args.num_experts;
  const Choice choice = moe::choose<kEach>(logits, args.num_experts, args.top_k, args.normalize);
  if (lane < args.top_k) {
    args.routing.experts[row * args.top_k + choice.slot] = choice.expert;
    args.routing.weights[row * args.top_k + choice.slot] = choice.weight;
  }
  return choice;
}

__device__ void write_tiles(const MoeRouteArgs& args, int expert, int count, const Begin* begins) {
  const Begin begin = begins[expert];
  for (int tile = begin.tile; tile < begins[expert + 1].tile; ++tile) {
    args.routing.tiles[tile] = {expert, begin.place, count, begin.tile};
  }
}

/// All that follows the logits of up to kFusedRows rows, by one block.
template <int kEach>
__device__ void route_few(const MoeRouteArgs& args) {
  constexpr int kThreads = 32 * kFewWarps;
  static_assert(kFusedRows == 64 && kThreads >= kMoeMaxExperts);
  __shared__ unsigned long long members[kMoeMaxExperts];  // of an expert, a bit for each row
  __shared__ int counts[kMoeMaxExperts];
  __shared__ Begin begins[kMoeMaxExperts + 1];
  __shared__ std::int16_t experts[kFusedRows * kMoeMaxTopK];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  members[thread] = 0;
  __syncthreads();
  for (int row = thread / 32; row < args.m; row += kFewWarps) {
    const Choice choice = choose_row<kEach>(args, row);
    if (lane < args.top_k) {
      experts[row * args.top_k + choice.slot] = static_cast<std::int16_t>(choice.expert);
      atomicOr(&members[choice.expert], 1ull << row);
    }
  }
  __syncthreads();
  counts[thread] = __popcll(members[thread]);
  __syncthreads();
  if (thread < 32) moe::scan_experts(counts, args.num_experts, args.tokens, begins);
  __syncthreads();
  for (int pair = thread; pair < args.m * args.top_k; pair += kThreads) {
    const int expert = experts[pair];
    const unsigned long long before = members[expert] & ((1ull << pair / args.top_k) - 1);
    moe::write_place(args, pair, begins[expert].place + __popcll(before));
  }
  if (thread < args.num_experts) write_tiles(args, thread, counts[thread], begins);
  if (thread == 0) args.routing.counters[0] = begins[args.num_experts].tile;
}

/// kEach: experts of a lane when a row's are chosen.
template <int kEach>
__global__ void __launch_bounds__(32 * kFewWarps) route_few_kernel(const MoeRouteArgs args) {
  cudaTriggerProgrammaticLaunchCompletion();
  const Logits<kFewWarps, 1, 1> logits(args);
  logits.prefetch();
  cudaGridDependencySynchronize();
  logits.run();
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int blocks = static_cast<int>(gridDim.x * gridDim.y);
    is_last = atomicAdd(args.routing.counters + 1, 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  if (threadIdx.x == 0) args.routing.counters[1] = 0;
  route_few<kEach>(args);
}

template <int kRowTiles, int kExpertTiles>
__global__ void __launch_bounds__(32 * kManyWarps, 2) logits_kernel(const MoeRouteArgs args) {
  cudaTriggerProgrammaticLaunchCompletion();
  const Logits<kManyWarps, kRowTiles, kExpertTiles> logits(args);
  cudaGridDependencySynchronize();
  logits.run();
}

/// A warp for each of kRowBlock rows; which of them chose an expert, as bits of a word, to routing.members.
template <int kEach>
__global__ void __launch_bounds__(kBlockThreads) choose_kernel(const MoeRouteArgs args) {
  cudaTriggerProgrammaticLaunchCompletion();
  __shared__ unsigned members[kMoeMaxExperts];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < args.num_experts) members[thread] = 0;
  __syncthreads();
  cudaGridDependencySynchronize();
  const int row = static_cast<int>(blockIdx.x) * kRowBlock + thread / 32;
  if (row < args.m) {
    const Choice choice = choose_row<kEach>(args, row);
    if (thread % 32 < args.top_k) atomicOr(members + choice.expert, 1u << thread / 32);
  }
  __syncthreads();
  if (thread < args.num_experts) {
    args.routing.members[static_cast<std::size_t>(blockIdx.x) * args.num_experts + thread] = members[thread];
  }
}

/// Places of the pairs of kRowBlock rows, and tiles of some experts. Every block counts all pairs of all experts.
__global__ void __launch_bounds__(kBlockThreads) permute_kernel(const MoeRouteArgs args) {
  cudaTriggerProgrammaticLaunchCompletion();
  __shared__ int counts[kMoeMaxExperts];
  __shared__ int before[kMoeMaxExperts];  // of counts, those of blocks before this one
  __shared__ Begin begins[kMoeMaxExperts + 1];
  const int thread = static_cast<int>(threadIdx.x);
  const int block = static_cast<int>(blockIdx.x);
  const int blocks = static_cast<int>(gridDim.x);
  if (thread < args.num_experts) counts[thread] = before[thread] = 0;
  __syncthreads();
  cudaGridDependencySynchronize();
  const int each = (args.num_experts + 31) / 32 * 32;  // threads that read a row of words
  const int expert = thread % each;
  if (expert < args.num_experts && thread / each < kBlockThreads / each) {
    int count = 0;
    int earlier = 0;
#pragma unroll 8
    for (int i = thread / each; i < blocks; i += kBlockThreads / each) {
      const int own = __popc(__ldcg(args.routing.members + static_cast<std::size_t>(i) * args.num_experts + expert));
      count += own;
      if (i < block) earlier += own;
    }
    atomicAdd(counts + expert, count);
    atomicAdd(before + expert, earlier);
  }
  __syncthreads();
  if (thread < 32) moe::scan_experts(counts, args.num_experts, args.tokens, begins);
  __syncthreads();
  const int pair = block * kRowBlock * args.top_k + thread;
  if (thread < kRowBlock * args.top_k && pair < args.m * args.top_k) {
    const int chosen = __ldcg(args.routing.experts + pair);
    const unsigned members = __ldcg(args.routing.members + static_cast<std::size_t>(block) * args.num_experts + chosen);
    const int own = __popc(members & ((1u << thread / args.top_k) - 1));
    moe::write_place(args, pair, begins[chosen].place + before[chosen] + own);
  }
  if (thread < args.num_experts && thread % blocks == block) write_tiles(args, thread, counts[thread], begins);
  if (block == 0 && thread == 0) args.routing.counters[0] = begins[args.num_experts].tile;
}

void check_args(const MoeRouteArgs& args) {
  const auto fail = [](const std::string& text) { throw Error(ErrorKind::kInternal, "moe_route: " + text); };
  if (args.width <= 0 || args.width % 8 != 0) {
    fail("width " + std::to_string(args.width) + " is not a positive multiple of 8");
  }
  if (args.num_experts < 1 || args.num_experts > kMoeMaxExperts) {
    fail("got " + std::to_string(args.num_experts) + " experts, allowed are 1 to " + std::to_string(kMoeMaxExperts));
  }
  if (args.top_k < 1 || args.top_k > std::min(args.num_experts, kMoeMaxTopK)) {
    fail("top_k " + std::to_string(args.top_k) + " of " + std::to_string(args.num_experts) +
         " experts; allowed are 1 to their number, at most " + std::to_string(kMoeMaxTopK));
  }
  if (args.tokens < 1) fail("a tile of no tokens");
}

unsigned ceil_div(int a, int b) {
  return static_cast<unsigned>((a + b - 1) / b);
}

}  // namespace

std::size_t moe_members(int m, int num_experts) {
  return static_cast<std::size_t>((m + kRowBlock - 1) / kRowBlock) * static_cast<std::size_t>(num_experts);
}

int moe_max_tiles(int m, int num_experts, int top_k, int tokens) {
  const int pairs = m * top_k;
  return pairs / tokens + std::min(pairs, num_experts);
}

void moe_route(const MoeRouteArgs& args, const Stream& stream) {
  check_args(args);
  if (args.m <= 0) return;
  // Experts of a lane: 1, 4 or 16.
  const int size = args.num_experts <= 32 ? 0 : args.num_experts <= 128 ? 1 : 2;
  if (args.m <= kFusedRows) {
    constexpr void (*kKernels[])(MoeRouteArgs) = {route_few_kernel<1>, route_few_kernel<4>, route_few_kernel<16>};
    const dim3 grid(ceil_div(args.num_experts, 8), ceil_div(args.m, 16));
    launch(kKernels[size], grid, dim3(32 * kFewWarps), 0, stream, args);
    return;
  }
  const dim3 block(32 * kManyWarps);
  const unsigned expert_blocks = ceil_div(args.num_experts, 32);
  if (args.num_experts <= 8) {
    launch(logits_kernel<1, 1>, dim3(1, ceil_div(args.m, 16)), block, 0, stream, args);
  } else if (expert_blocks * ceil_div(args.m, 64) < kFewBlocks) {
    launch(logits_kernel<2, 4>, dim3(expert_blocks, ceil_div(args.m, 32)), block, 0, stream, args);
  } else {
    launch(logits_kernel<4, 4>, dim3(expert_blocks, ceil_div(args.m, 64)), block, 0, stream, args);
  }
  constexpr void (*kKernels[])(MoeRouteArgs) = {choose_kernel<1>, choose_kernel<4>, choose_kernel<16>};
  const dim3 blocks(ceil_div(args.m, kRowBlock));
  launch(kKernels[size], blocks, dim3(kBlockThreads), 0, stream, args);
  launch(permute_kernel, blocks, dim3(kBlockThreads), 0, stream, args);
}

}  // namespace aotllm::cuda
