#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "gemm/tile_gemm.h"
#include "gemm/tile_gemm_epilogue.cuh"

// What producers and consumers of a tile GEMM share: constants, the places in shared memory, the walk over tiles.
namespace aotllm::cuda::tile {

using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;
using cutlass::arch::NamedBarrier;

inline constexpr int kBlockBytes = 128;  // of one row along k
inline constexpr int kConsumers = 256;
inline constexpr int kThreads = kConsumers + 128;

/// A kernel's constants.
template <WeightType kType_, int kTile>
struct Config {
  static constexpr WeightType kType = kType_;
  static constexpr bool kFp8 = kType != WeightType::kBf16;
  static constexpr TileShape kShape = kTileShapes[kTile];
  static constexpr int kRows = kShape.rows;
  static constexpr int kColumns = kShape.columns;
  static constexpr int kClusterM = kShape.cluster_m;
  static constexpr int kSplits = kShape.splits;
  static constexpr int kCtas = kShape.ctas();
  static constexpr int kBlockK = kBlockBytes / (kFp8 ? 1 : 2);
  static constexpr int kGroups = kColumns / 8;
  static constexpr int kOwnGroups = kGroups / kSplits;  // those that a CTA finishes
  static constexpr int kShareFloat4s = kOwnGroups * kConsumers;

  static constexpr int kXBytes = kRows * kBlockBytes;
  static constexpr int kWBytes = kColumns * kBlockBytes;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  // Scales and biases of the tile's columns: for both warpgroups, of two tiles in turn. A CTA with splits has one tile.
  static constexpr int kColumnBytes = (kSplits == 1 ? 4 : 2) * kColumns * static_cast<int>(sizeof(Column));
  static constexpr int kTurnBytes = 8 * Stage::kBytes;
  static constexpr int kBarrierBytes = 256;
  // After the one tile of a CTA with splits the ring holds its sums, and behind them the room to turn them over.
  static constexpr int kSumBytes = kSplits > 1 ? kRows * kColumns * 4 : 0;
  static constexpr int kOtherBytes =
      1024 /* alignment */ + kColumnBytes + (kSplits == 1 ? kTurnBytes : 0) + kBarrierBytes;
  static constexpr int kFit = (227 * 1024 - kOtherBytes) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kOtherBytes + kRingBytes;

  static_assert(kClusterM == 1 || kSplits == 1);
  static_assert(kRows == 128 && (kColumns / kClusterM) % 8 == 0);
  static_assert(kGroups % kSplits == 0 && kOwnGroups % 2 == 0);  // gate and up of a column stay together
  static_assert(kType != WeightType::kFp8Block || kColumns == 128);
  static_assert(kSplits == 1 || kSumBytes + kTurnBytes <= kRingBytes);
  static_assert(kStages >= 3 && 2 * kStages * 8 <= kBarrierBytes);
};

/// Where things are in shared memory.
template <class C>
struct Shared {
  std::uint8_t* ring;    // [stages][x block, w block], or in the place of an x block 64 columns of residuals
  std::uint8_t* turn;    // [8 warps][Stage]
  Column* columns;       // [tile's turn][2 warpgroups][kColumns]
  std::uint64_t* full;   // [stages]: the blocks have come
  std::uint64_t* empty;  // [stages]: all that read them are done

  __device__ explicit Shared(std::uint8_t* raw) {
    const std::uint32_t address = cute::cast_smem_ptr_to_uint(raw);
    ring = raw + ((1024 - address % 1024) % 1024);
    turn = ring + (C::kSplits == 1 ? C::kRingBytes : C::kSumBytes);
    columns = reinterpret_cast<Column*>(ring + C::kRingBytes + (C::kSplits == 1 ? C::kTurnBytes : 0));
    full = reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::uint8_t*>(columns) + C::kColumnBytes);
    empty = full + C::kStages;
  }
};

/// A place in the ring and how often it has gone round.
template <int kStages>
struct RingPosition {
  int stage = 0;
  std::uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/// This CTA in its cluster, and the walk over tiles.
template <class C>
struct Walk {
  int rank_m, split;
  int first_block, num_blocks;  // along k
  int tile, step, total;

  __device__ explicit Walk(const TileParams& p) {
    const int rank = static_cast<int>(blockIdx.x) % C::kCtas;
    rank_m = C::kSplits == 1 ? rank : 0;
    split = C::kSplits == 1 ? 0 : rank;
    const int blocks = (p.k + C::kBlockK - 1) / C::kBlockK;
    first_block = blocks * split / C::kSplits;
    num_blocks = blocks * (split + 1) / C::kSplits - first_block;
    tile = static_cast<int>(blockIdx.x) / C::kCtas;
    total = p.m_clusters * p.n_clusters;
    step = static_cast<int>(gridDim.x) / C::kCtas;
  }
  __device__ bool more() const { return tile < total; }
  __device__ void next() { tile += step; }

  /// First row and column of this CTA's tile: groups of clusters over the rows, in each of them column by column.
  __device__ int2 origin(const TileParams& p) const {
    const int per_group = p.group_height * p.n_clusters;
    const int first = tile / per_group * p.group_height;
    const int height = min(p.group_height, p.m_clusters - first);
    const int within = tile % per_group;
    const int m = first + within % height;
    return make_int2((m * C::kClusterM + rank_m) * C::kRows, within / height * C::kColumns);
  }
};

}  // namespace aotllm::cuda::tile
