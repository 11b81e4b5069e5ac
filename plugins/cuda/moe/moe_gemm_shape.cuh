#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>

#include "gemm/int_shape.cuh"
#include "gemm/skinny_shape.cuh"
#include "moe/moe_gemm.h"

// Constants of the experts' GEMMs, and the places in shared memory.
namespace aotllm::cuda::moe {

using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;

/// 64 rows of W × kTokens × 32 bytes along k, both operands in shared memory.
template <bool kFp8, int kTokens>
struct Mma : SkinnyMma<!kFp8, kTokens> {};
#define AOTLLM_MOE_MMA(N)                                                                                 \
  template <>                                                                                             \
  struct Mma<false, N> : skinny::gmma::MMA_64x##N##x16_F32BF16BF16_SS<skinny::kMajor, skinny::kMajor> {}; \
  template <>                                                                                             \
  struct Mma<true, N> : skinny::gmma::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<> {};
AOTLLM_MOE_MMA(128)
AOTLLM_MOE_MMA(160)
AOTLLM_MOE_MMA(192)
#undef AOTLLM_MOE_MMA

constexpr int kMostStages = 8;
constexpr int kOtherBytes = 1024 /* alignment */ + 2 * kMostStages * 8 /* barriers */;

/// Stages of the ring of one of `resident` CTAs on a multiprocessor.
constexpr int ring_stages(int stage_bytes, int resident) {
  const int fit = ((228 / resident - 1) * 1024 - kOtherBytes) / stage_bytes;
  return fit < kMostStages ? fit : kMostStages;
}

/// Rows of W are the M of the tensor cores, tokens the N. A stage of the ring is kSub columns of 128 bytes: W
/// [kSub][kRows][128 B], then X [kSub][kTokens][128 B], both in the 128-byte swizzle.
template <bool kFp8_, int kTokens_, int kCluster_ = 1>
struct Shape {
  static constexpr bool kFp8 = kFp8_;
  static constexpr bool kIntegers = false;
  static constexpr bool kRowScales = kFp8;  // of W
  static constexpr int kTokens = kTokens_;
  static constexpr int kCluster = kCluster_;      // CTAs with neighbouring tokens: each loads a part of W for all
  static constexpr bool kLarge = kTokens >= 128;  // one CTA on a multiprocessor, else two
  static constexpr int kResident = kLarge ? 1 : 2;

  // Blocks of 64 rows of a warpgroup. Large tiles are bound by what comes from the L2, so they are as large as the
  // registers for sums allow; those of FP8 need more for the sums of a stage.
  static constexpr int kBlocks = kTokens == 128 || (kLarge && !kFp8) ? 2 : 1;
  static constexpr int kWarpgroups = kTokens <= 16 ? 1 : 2;
  static constexpr int kRows = 64 * kBlocks * kWarpgroups;
  static constexpr int kSub = kTokens <= 16 ? 2 : 1;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kProducers = kTokens <= 16 ? 32 : kLarge ? 128 : 64;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kAcc = kTokens / 2;  // accumulators of a thread in a block

  static constexpr int kWBytes = kRows * 128;
  static constexpr int kXBytes = kTokens * 128;
  static constexpr int kStageBytes = kSub * (kWBytes + kXBytes);
  static constexpr int kStages = ring_stages(kStageBytes, kResident);
  static constexpr int kSharedBytes = kOtherBytes + kStages * kStageBytes;

  static_assert(kCluster == 1 || (kLarge && kRows / kMoeBoxRows % kCluster == 0));
  static_assert(kStages >= 3);
};

/// Of integers. A stage is that of IntTile: codes, then X in kSub columns of 128 bytes, then scales and zeros.
template <IntFormat kFormat, int kTokens_, int kRows_, int kBlocksOfStage, int kResident_, int kBlocks_ = 1>
struct IntegerShape {
  using Blocks = IntTile<kFormat, kTokens_, kRows_, kBlocksOfStage>;
  static constexpr bool kFp8 = false;
  static constexpr bool kIntegers = true;
  static constexpr bool kRowScales = kFormat == IntFormat::kInt8Row;
  static constexpr int kTokens = kTokens_;
  static constexpr int kCluster = 1;
  static constexpr bool kLarge = kTokens >= 128;
  static constexpr int kResident = kResident_;

  static constexpr int kBlocks = kBlocks_;
  static constexpr int kWarpgroups = Blocks::kWarpgroups / kBlocks;
  static constexpr int kRows = kRows_;
  static constexpr int kSub = 2 * kBlocksOfStage;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kProducers = kLarge ? 128 : 32;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kAcc = Blocks::kAcc;

  static constexpr int kWBytes = Blocks::kXOffset / kSub;
  static constexpr int kXBytes = Blocks::kXBytes / 2;
  static constexpr int kStageBytes = Blocks::kStageBytes;
  static constexpr int kStages = ring_stages(kStageBytes, kResident);
  static constexpr int kSharedBytes = kOtherBytes + kStages * kStageBytes;

  static_assert(kStages >= 3);
};

template <class S>
struct Shared {
  std::uint8_t* ring;
  std::uint64_t* full;   // [kStages]: W and X have come
  std::uint64_t* empty;  // [kStages]: all warps have read them

  __device__ explicit Shared(std::uint8_t* raw) {
    ring = raw + ((1024 - cute::cast_smem_ptr_to_uint(raw) % 1024) % 1024);
    full = reinterpret_cast<std::uint64_t*>(ring + S::kStages * S::kStageBytes);
    empty = full + S::kStages;
  }
  __device__ std::uint8_t* w(int stage, int sub) const { return ring + stage * S::kStageBytes + sub * S::kWBytes; }
  __device__ std::uint8_t* x(int stage, int sub) const {
    return ring + stage * S::kStageBytes + S::kSub * S::kWBytes + sub * S::kXBytes;
  }
};

/// A place in the ring, and how often it has gone round.
template <class S>
struct Ring {
  int stage = 0;
  std::uint32_t phase = 0;

  __device__ void next() {
    if (++stage == S::kStages) stage = 0, phase ^= 1;
  }
};

/// What a CTA computes at a time: kRows rows of an expert's W × its places [place, place + count).
struct Tile {
  int expert;
  int row;  // of the expert's W
  int place;
  int count;        // perhaps none, of a CTA in a cluster
  bool reads_once;  // no other tile reads these rows of W
};

/// The tiles of a cluster, a part for each CTA. All tiles of an expert that read the same rows of W are neighbours.
template <class S>
class Walk {
 public:
  __device__ explicit Walk(const MoeGemmArgs& args)
      : tiles_(reinterpret_cast<const int4*>(args.tiles)), row_tiles_((args.n + S::kRows - 1) / S::kRows) {
    record_ = load();  // there are as many as the grid has CTAs for; not all of them may hold something
    total_ = row_tiles_ * __ldcg(args.num_tiles);
  }
  __device__ bool more() const { return index_ < total_; }
  __device__ void next() {
    index_ += static_cast<int>(gridDim.x) / S::kCluster;
    if (more()) record_ = load();
  }
  __device__ Tile tile() const {
    const MoeTile expert{record_.x, record_.y, record_.z, record_.w};
    constexpr int kPlaces = S::kTokens * S::kCluster;
    const int tiles = (expert.count + kPlaces - 1) / kPlaces;
    const int within = index_ - expert.first_tile * row_tiles_;
    const int first = within % tiles * kPlaces + static_cast<int>(blockIdx.x) % S::kCluster * S::kTokens;
    return {expert.expert, within / tiles * S::kRows, expert.first_place + first,
            max(0, min(S::kTokens, expert.count - first)), tiles == 1};
  }

 private:
  __device__ int4 load() const { return __ldcg(tiles_ + index_ / row_tiles_); }

  const int4* tiles_;
  int row_tiles_;
  int index_ = static_cast<int>(blockIdx.x) / S::kCluster;
  int4 record_;
  int total_;
};

}  // namespace aotllm::cuda::moe
