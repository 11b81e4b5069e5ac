#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/int_load.cuh"
#include "moe/moe_gemm_shape.cuh"

// The loads: W by TMA (of integers in blocks), rows of X gathered in pieces of 16 bytes by the threads of the
// producers' warps.
namespace aotllm::cuda::moe {

/// One of the threads that fill the ring. All take part in every stage of X; the first one also loads W.
template <class S>
struct Producer {
  static constexpr int kColumn = S::kFp8 ? 128 : 64;  // elements of 128 bytes
  static constexpr int kStep = S::kProducers / 8;     // rows that are loaded at a time: 8 pieces each
  static constexpr int kOwn = S::kTokens / kStep;     // rows of a thread
  static constexpr std::uint32_t kNoRow = 0xFFFFFFFFu;

  const CUtensorMap& w_map;
  const MoeGemmArgs& args;
  const Shared<S>& shared;
  int thread = static_cast<int>(threadIdx.x) - S::kConsumers;
  int piece = thread % 8;
  int first = thread / 8;
  std::uint32_t rows[kOwn];  // where rows of x begin, in pieces; kNoRow = none

  __device__ Producer(const CUtensorMap& map, const MoeGemmArgs& a, const Shared<S>& s)
      : w_map(map), args(a), shared(s) {}

  __device__ int row_bytes() const { return args.k * (S::kFp8 ? 1 : 2); }
  __device__ int steps() const { return (row_bytes() + 128 * S::kSub - 1) / (128 * S::kSub); }

  __device__ void load_w(const Tile& tile, int step, int stage) const {
    using Hint = cute::TMA::CacheHintSm90;
    const Hint hint = tile.reads_once ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL;
    if constexpr (S::kIntegers) {
      load_blocks(tile, step, stage, hint);
    } else {
      load_boxes(tile, step, stage, static_cast<std::uint64_t>(hint));
    }
  }

  __device__ void load_boxes(const Tile& tile, int step, int stage, std::uint64_t hint) const {
    ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full[stage], S::kSub * S::kWBytes);
#pragma unroll
    for (int sub = 0; sub < S::kSub; ++sub) {
      constexpr int kBoxes = S::kRows / kMoeBoxRows / S::kCluster;
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        const int box = i + static_cast<int>(blockIdx.x) % S::kCluster * kBoxes;
        std::uint8_t* to = shared.w(stage, sub) + box * kMoeBoxRows * 128;
        const int column = (step * S::kSub + sub) * kColumn;
        const int row = tile.expert * args.n + tile.row + box * kMoeBoxRows;
        if constexpr (S::kCluster == 1) {
          cute::SM90_TMA_LOAD_2D::copy(&w_map, &shared.full[stage], hint, to, column, row);
        } else {
          constexpr std::uint16_t kAll = (1 << S::kCluster) - 1;
          cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&w_map, &shared.full[stage], kAll, hint, to, column, row);
        }
      }
    }
  }

  __device__ void load_blocks(const Tile& tile, int step, int stage, cute::TMA::CacheHintSm90 hint) const {
    const IntLoad<typename S::Blocks> w(args.blocks, tile.expert * args.blocks.strips, tile.row / kIntRows, step);
    ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full[stage], w.bytes());
    w.start({shared.ring, S::kStages}, stage, &shared.full[stage], hint);
  }

  __device__ void find_rows(const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int token = first + i * kStep;
      rows[i] = kNoRow;
      if (token >= tile.count) continue;
      const int row = args.rows != nullptr ? __ldcg(args.rows + tile.place + token) : tile.place + token;
      rows[i] = static_cast<std::uint32_t>(row) * static_cast<std::uint32_t>(row_bytes() / 16);
    }
  }

  /// Rows of tokens that are not there keep what they hold: it only reaches columns of the product that nobody reads.
  __device__ void load_x(int step, int stage) const {
#pragma unroll
    for (int sub = 0; sub < S::kSub; ++sub) {
      const int offset = (step * S::kSub + sub) * 128 + 16 * piece;
      const bool inside = offset < row_bytes();  // beyond k are zeros
      const std::uint8_t* from = static_cast<const std::uint8_t*>(args.x) + (inside ? offset : 0);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (rows[i] == kNoRow) continue;
        const int token = first + i * kStep;
        std::uint8_t* to = shared.x(stage, sub) + token * 128 + ((piece ^ (token % 8)) << 4);
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(
            *reinterpret_cast<const uint4*>(from + std::size_t{rows[i]} * 16), *reinterpret_cast<uint4*>(to), inside);
      }
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(&shared.full[stage]);
  }

  __device__ void run() {
    Ring<S> at;
    int early = 0;  // stages of the first tile whose W is on the way already
    if (args.tiles_known && thread == 0) {
      const Walk<S> walk(args);
      if (walk.more()) {
        const Tile tile = walk.tile();
        for (early = 0; early < min(S::kStages, steps()); ++early) load_w(tile, early, early);
      }
    }
    cudaGridDependencySynchronize();
    for (Walk<S> walk(args); walk.more(); walk.next()) {
      const Tile tile = walk.tile();
      find_rows(tile);
      for (int step = 0; step < steps(); ++step, at.next()) {
        ClusterBarrier::wait(&shared.empty[at.stage], at.phase ^ 1);
        if (thread == 0 && step >= early) load_w(tile, step, at.stage);
        load_x(step, at.stage);
      }
      early = 0;
    }
  }
};

}  // namespace aotllm::cuda::moe
