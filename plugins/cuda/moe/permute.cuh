#pragma once

#include "moe/choose.cuh"

// From the experts of pairs to places and tiles.
namespace aotllm::cuda::moe {

/// Where an expert's places and tiles begin.
struct Begin {
  int place;
  int tile;
};

/// One warp: begins of all experts and, last, of what would follow them, to `begins` [num_experts + 1].
__device__ inline void scan_experts(const int* counts, int num_experts, int tokens, Begin* begins) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Begin carry{0, 0};
  for (int first = 0; first < num_experts; first += 32) {
    const int expert = first + lane;
    const int count = expert < num_experts ? counts[expert] : 0;
    const int tiles = (count + tokens - 1) / tokens;
    Begin sum{count, tiles};  // inclusive
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int place = __shfl_up_sync(kFullMask, sum.place, step);
      const int tile = __shfl_up_sync(kFullMask, sum.tile, step);
      if (lane >= step) sum.place += place, sum.tile += tile;
    }
    if (expert < num_experts) begins[expert] = {carry.place + sum.place - count, carry.tile + sum.tile - tiles};
    carry.place += __shfl_sync(kFullMask, sum.place, 31);
    carry.tile += __shfl_sync(kFullMask, sum.tile, 31);
  }
  if (lane == 0) begins[num_experts] = carry;
}

__device__ inline void write_place(const MoeRouteArgs& args, int pair, int place) {
  const int row = pair / args.top_k;
  args.routing.places[pair] = place;
  args.routing.rows[place] = row;
  if (args.x_scales != nullptr) args.routing.row_scales[place] = __ldcg(args.x_scales + row);
}

}  // namespace aotllm::cuda::moe
