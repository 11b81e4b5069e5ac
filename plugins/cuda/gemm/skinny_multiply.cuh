#pragma once

#include "gemm/skinny_gemm.h"
#include "gemm/skinny_shape.cuh"

// Products of a stage of the ring, by the warpgroups of a CTA.
namespace aotllm::cuda {

/// Scales of kFp8Block, w · x of a chunk of columns at a time in shared memory: [kScaleChunk][kTokens], of this
/// warpgroup. The next chunk's are on the way in registers meanwhile.
template <class Shape>
struct SkinnyBlockScales {
  static constexpr int kEach = (Shape::kTokens * Shape::kScaleChunk + 127) / 128;

  const SkinnyArgs& args;
  int m;
  int warpgroup;
  float* staged;
  float next[kEach];

  __device__ void load(int tile, int chunk) {
    const int row = tile * Shape::kRows + warpgroup * 64;
    const int column = chunk * Shape::kScaleChunk + static_cast<int>(threadIdx.x) % Shape::kScaleChunk;
    const bool inside = row < args.n && column < args.k_blocks;
    const float w = inside ? __ldg(args.w_scales + static_cast<std::size_t>(row / 128) * args.k_blocks + column) : 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = static_cast<int>(threadIdx.x) % 128 / Shape::kScaleChunk + i * (128 / Shape::kScaleChunk);
      const bool wanted = inside && token < m;
      next[i] = wanted ? w * __ldcg(args.x_scales + static_cast<std::size_t>(token) * args.k_blocks + column) : 0.0f;
    }
  }

  /// Makes the chunk of (tile, step) readable and starts loading the one that follows.
  __device__ void stage(int tile, int step) {
    skinny_sync(128, 1 + warpgroup);  // nobody reads the previous chunk any more
    const int column = static_cast<int>(threadIdx.x) % Shape::kScaleChunk;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = static_cast<int>(threadIdx.x) % 128 / Shape::kScaleChunk + i * (128 / Shape::kScaleChunk);
      if (token < Shape::kTokens) staged[column * Shape::kScaleStride + token] = next[i];
    }
    skinny_sync(128, 1 + warpgroup);
    const int chunk = step * Shape::kSub / Shape::kScaleChunk + 1;
    const bool same = chunk * Shape::kScaleChunk < args.split.per_tile * Shape::kSub;
    load(same ? tile : tile + 1, same ? chunk : 0);
  }

  /// Of tokens 8j + 2 (lane % 4) + {0, 1}.
  __device__ float2 at(int column, int j) const {
    const float* row = staged + column % Shape::kScaleChunk * Shape::kScaleStride;
    return *reinterpret_cast<const float2*>(row + 8 * j + 2 * (threadIdx.x % 4));
  }
};

/// acc += W · x of one stage. FP8 products are summed in the tensor cores over 128 columns only, where they keep fewer
/// bits than float32, then in registers; as many columns as registers allow are on the way together.
template <class Shape, class Scales>
__device__ void skinny_multiply(float (&acc)[Shape::kAcc], std::uint64_t w, std::uint64_t x, int step,
                                const Scales& scales) {
  using skinny::gmma::ScaleOut;
  constexpr auto kIndex = std::make_index_sequence<Shape::kAcc>{};
  constexpr int kSteps = 4;  // of 32 bytes
  if constexpr (Shape::kBf16) {
    for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(acc[i]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        skinny_mma<typename Shape::Mma>(w + sub * Shape::kWBytes / 16 + 2 * i, x + sub * Shape::kXBytes / 16 + 2 * i,
                                        acc, ScaleOut::One, kIndex);
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(acc[i]);
  } else {
    float sum[Shape::kSub][Shape::kAcc];
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
      for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(sum[sub][i]);
    }
    cute::warpgroup_arrive();
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        skinny_mma<typename Shape::Mma>(w + sub * Shape::kWBytes / 16 + 2 * i, x + sub * Shape::kXBytes / 16 + 2 * i,
                                        sum[sub], i == 0 ? ScaleOut::Zero : ScaleOut::One, kIndex);
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int sub = 0; sub < Shape::kSub; ++sub) {
      for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(sum[sub][i]);
#pragma unroll
      for (int j = 0; j < Shape::kGroups; ++j) {
        float2 scale = make_float2(1.0f, 1.0f);
        if constexpr (Shape::kType == WeightType::kFp8Block) scale = scales.at(step * Shape::kSub + sub, j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          acc[4 * j + 2 * h] += sum[sub][4 * j + 2 * h] * scale.x;
          acc[4 * j + 2 * h + 1] += sum[sub][4 * j + 2 * h + 1] * scale.y;
        }
      }
    }
  }
}

/// The same where X has a scale for each kCodeGroup columns, which is one instruction's: [group][kTokens] at `scales`.
template <class Shape>
__device__ void skinny_multiply_groups(float (&acc)[Shape::kAcc], std::uint64_t w, std::uint64_t x,
                                       const float* scales) {
  static_assert(kCodeGroup == 32);
  constexpr auto kIndex = std::make_index_sequence<Shape::kAcc>{};
  constexpr int kGroups = Shape::kSub * 4;
  float sum[kGroups][Shape::kAcc];
#pragma unroll
  for (int s = 0; s < kGroups; ++s) {
    for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(sum[s][i]);
  }
  cute::warpgroup_arrive();
#pragma unroll
  for (int s = 0; s < kGroups; ++s) {
    skinny_mma<typename Shape::Mma>(w + s / 4 * (Shape::kWBytes / 16) + 2 * (s % 4),
                                    x + s / 4 * (Shape::kXBytes / 16) + 2 * (s % 4), sum[s],
                                    skinny::gmma::ScaleOut::Zero, kIndex);
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_wait<0>();
  const float* mine = scales + 2 * (threadIdx.x % 4);  // of tokens 8j + 2 (lane % 4) + {0, 1}
#pragma unroll
  for (int s = 0; s < kGroups; ++s) {
    for (int i = 0; i < Shape::kAcc; ++i) cute::warpgroup_fence_operand(sum[s][i]);
#pragma unroll
    for (int j = 0; j < Shape::kGroups; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(mine + s * Shape::kTokens + 8 * j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        acc[4 * j + 2 * h] = fmaf(sum[s][4 * j + 2 * h], scale.x, acc[4 * j + 2 * h]);
        acc[4 * j + 2 * h + 1] = fmaf(sum[s][4 * j + 2 * h + 1], scale.y, acc[4 * j + 2 * h + 1]);
      }
    }
  }
}

}  // namespace aotllm::cuda
