#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <utility>

#include "elementwise/bf16x8.cuh"
#include "gemm/int_multiply.cuh"
#include "gemm/skinny_epilogue.cuh"
#include "moe/moe_gemm_shape.cuh"
#include "uniform_warpgroup.cuh"

// The products, and y from accumulators: a warp has 16 rows of W of each block; thread `lane` holds rows lane / 4 + 8h
// of tokens 8j + 2 (lane % 4) + b in acc[4j + 2h + b].
namespace aotllm::cuda::moe {

template <class S>
struct Consumer {
  using Sums = float[S::kAcc];

  const MoeGemmArgs& args;
  const Shared<S>& shared;
  int warpgroup = uniform_warpgroup();
  int warp = static_cast<int>(threadIdx.x) % 128 / 32;
  int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint64_t w, x;  // descriptors of the first stage
  Ring<S> at;

  __device__ Consumer(const MoeGemmArgs& a, const Shared<S>& s) : args(a), shared(s) {
    w = skinny_descriptor(cute::cast_smem_ptr_to_uint(s.w(0, 0))) + warpgroup * S::kBlocks * 64 * 128 / 16;
    x = skinny_descriptor(cute::cast_smem_ptr_to_uint(s.x(0, 0)));
  }

  __device__ void run() {
    const int columns = (args.k * (S::kFp8 ? 1 : 2) + 127) / 128;
    const int steps = (columns + S::kSub - 1) / S::kSub;
    for (Walk<S> walk(args); walk.more(); walk.next()) {
      const Tile tile = walk.tile();
      if (S::kCluster > 1 && tile.count == 0) {
        for (int step = 0; step < steps; ++step) release(arrived());
        continue;
      }
      float acc[S::kBlocks][S::kAcc] = {};
      if constexpr (S::kIntegers) {
        sum_integers(acc, steps);
      } else if constexpr (S::kFp8) {
        sum_promoted(acc, steps);
      } else {
        sum(acc, steps);
      }
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) {
        const int row16 = tile.row + (warpgroup * S::kBlocks + block) * 64 + warp * 16;
        if (row16 < args.n) write(tile, row16, acc[block]);
      }
    }
  }

 private:
  static __device__ void fence(Sums& sums) {
#pragma unroll
    for (float& value : sums) cute::warpgroup_fence_operand(value);
  }

  /// Waits for the ring's next stage; X was written by ordinary threads.
  __device__ int arrived() {
    const int stage = at.stage;
    ClusterBarrier::wait(&shared.full[stage], at.phase);
    cutlass::arch::fence_view_async_shared();
    at.next();
    return stage;
  }
  /// Tells all that write to this stage of the ring. Of integers each lane has read codes of its own.
  __device__ void release(int stage) const {
    if constexpr (S::kIntegers) __syncwarp();
    if constexpr (S::kCluster == 1) {
      if (lane == 0) ClusterBarrier::arrive(&shared.empty[stage]);
    } else {
      if (lane < S::kCluster) ClusterBarrier::arrive(&shared.empty[stage], lane, 1);
    }
  }

  /// sums (+)= the 128 bytes along k of column `sub` of a stage, of a block of rows.
  template <bool kFresh>
  __device__ void multiply(int stage, int sub, int block, Sums& sums) const {
    using cute::SM90::GMMA::ScaleOut;
    constexpr auto kIndex = std::make_index_sequence<S::kAcc>{};
    const std::uint64_t a = w + (stage * S::kStageBytes + sub * S::kWBytes + block * 64 * 128) / 16;
    const std::uint64_t b = x + (stage * S::kStageBytes + sub * S::kXBytes) / 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      skinny_mma<Mma<S::kFp8, S::kTokens>>(a + 2 * i, b + 2 * i, sums,
                                           kFresh && i == 0 ? ScaleOut::Zero : ScaleOut::One, kIndex);
    }
  }

  __device__ void sum(float (&acc)[S::kBlocks][S::kAcc], int steps) {
    int previous = -1;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int stage = arrived();
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) fence(acc[block]);
      cute::warpgroup_arrive();
#pragma unroll
      for (int sub = 0; sub < S::kSub; ++sub) {
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block) multiply<false>(stage, sub, block, acc[block]);
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();  // the stage before this one has been read
      if (previous >= 0) release(previous);
      previous = stage;
    }
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) fence(acc[block]);
    if (previous >= 0) release(previous);
  }

  /// FP8 products are summed in the tensor cores over 128 columns only, where they keep fewer bits than float32, then
  /// in registers. Two such sums are under way at a time where a stage has two columns.
  __device__ void sum_promoted(float (&acc)[S::kBlocks][S::kAcc], int steps) {
    Sums product;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int stage = arrived();
      if constexpr (S::kSub == 2) {
        static_assert(S::kBlocks == 1);
        Sums second;
        start(stage, 0, 0, product);
        start(stage, 1, 0, second);
        finish<1>(product, acc[0]);
        finish<0>(second, acc[0]);
      } else {
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block) {
          start(stage, 0, block, product);
          finish<0>(product, acc[block]);
        }
      }
      release(stage);
    }
  }
  __device__ void start(int stage, int sub, int block, Sums& product) const {
    fence(product);
    cute::warpgroup_arrive();
    multiply<true>(stage, sub, block, product);
    cute::warpgroup_commit_batch();
  }
  template <int kPending>
  static __device__ void finish(Sums& product, Sums& acc) {
    cute::warpgroup_wait<kPending>();
    fence(product);
#pragma unroll
    for (int i = 0; i < S::kAcc; ++i) acc[i] += product[i];
  }

  __device__ void sum_integers(float (&acc)[S::kBlocks][S::kAcc], int steps) {
    using Blocks = typename S::Blocks;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int stage = arrived();
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) {
        int_multiply_stage<Blocks>(acc[block], {shared.ring, S::kStages}, stage, warpgroup * S::kBlocks + block,
                                   args.blocks.k_blocks - step * Blocks::kSub);
      }
      release(stage);
    }
  }

  /// y of 16 rows of W. Pairs of tokens become pairs of rows, which are neighbours in y, by transposing 8 × 8 matrices.
  __device__ void write(const Tile& tile, int row16, const Sums& acc) const {
    float w_scales[2] = {1.0f, 1.0f};
    if constexpr (S::kRowScales) {
      const float* scales = args.w_scales + static_cast<std::size_t>(tile.expert) * args.n + row16 + lane / 4;
      w_scales[0] = __ldg(scales);
      w_scales[1] = __ldg(scales + 8);
    }
    constexpr int kGroups = S::kTokens / 8;
    constexpr int kTogether = kGroups < 4 ? kGroups : 4;  // whose scales are loaded at a time
#pragma unroll
    for (int base = 0; base < kGroups; base += kTogether) {
      if (8 * base >= tile.count) break;
      float x_scales[kTogether][2];
#pragma unroll
      for (int i = 0; i < 2 * kTogether; ++i) {
        const int token = 8 * (base + i / 2) + 2 * (lane % 4) + i % 2;
        x_scales[i / 2][i % 2] = S::kFp8 && token < tile.count ? __ldcg(args.x_scales + tile.place + token) : 1.0f;
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const float* sums = &acc[4 * (base + j)];
        float p[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          p[i / 2][i % 2] = S::kRowScales ? sums[i] * w_scales[i / 2] * x_scales[j][i % 2] : sums[i];
        }
        store(tile, row16, 8 * (base + j) + lane / 4, p);
      }
    }
  }

  /// Of [8 rows][8 tokens], two tokens of row lane / 4, to two rows of token lane / 4, as bf16.
  static __device__ std::uint32_t transposed(float first, float second) {
    std::uint32_t result;
    cute::SM75_U32x1_MOVM_T::copy(pack_bf16x2(first, second), result);
    return result;
  }

  __device__ void store(const Tile& tile, int row16, int token, const float (&p)[2][2]) const {
    const auto place = static_cast<std::size_t>(tile.place + token);
    if (args.is_gated) {
      const std::uint32_t pair =
          transposed(activate(p[0][0], args.activation) * p[1][0], activate(p[0][1], args.activation) * p[1][1]);
      auto* to = args.y + place * (args.n / 2) + row16 / 2 + 2 * (lane % 4);
      if (token < tile.count) *reinterpret_cast<std::uint32_t*>(to) = pair;
      return;
    }
    auto* to = args.y + place * args.n + row16 + 2 * (lane % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::uint32_t pair = transposed(p[h][0], p[h][1]);
      if (token < tile.count) *reinterpret_cast<std::uint32_t*>(to + 8 * h) = pair;
    }
  }
};

}  // namespace aotllm::cuda::moe
