#pragma once

#ifndef CUTLASS_ENABLE_GDC_FOR_SM90
#define CUTLASS_ENABLE_GDC_FOR_SM90
#endif

#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <cute/tensor.hpp>
#include <type_traits>

#include "attention/context_parameters.h"

namespace aotllm::cuda::context {

/// A kernel. The blocks of a cluster (1 or 2; FP8: 1) work on heads of one KV head and share its loads.
template <int headDim, bool fp8, bool softcap, int cluster>
struct Config {
  using Element = std::conditional_t<fp8, cute::half_t, cute::bfloat16_t>;  ///< of all operands of wgmma
  static constexpr int kHeadDim = headDim;
  static constexpr bool kFp8 = fp8;
  static constexpr bool kSoftcap = softcap;
  static constexpr int kKeys = headDim > 128 ? 64 : 128;  ///< of a step
  static constexpr int kRows = 64;                        ///< queries of a consumer warpgroup
  static constexpr int kConsumers = kContextTileRows / kRows;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = fp8 ? 72 : 56;  // of 504 for one producer and two consumers
  static constexpr int kConsumerRegisters = fp8 ? 216 : 224;
  static constexpr int kCluster = cluster;
  static constexpr int kStages = headDim == 64 ? 4 : headDim == 96 ? 3 : 2;  ///< of K, and of V
  static constexpr int kRawStages = !fp8 ? 0 : headDim > 128 ? 2 : 3;
  static constexpr bool kTakeTurns = headDim <= 128;  ///< of the consumers at the tensor cores

  /// Shared memory holds a matrix as panels of kChunk dims, [panel][row][kChunk], swizzled within the kChunk · 2 bytes
  /// of a row: what one TMA box writes, and what wgmma reads as a K-major operand (Q, K) or as an MN-major one (V).
  static constexpr int kChunk = headDim % 64 == 0 ? 64 : 32;
  static constexpr int kChunks = headDim / kChunk;

  template <cute::SM90::GMMA::Major major>
  static constexpr auto atom() {
    using namespace cute::SM90::GMMA;
    if constexpr (major == Major::K) {
      if constexpr (kChunk == 64) return Layout_K_SW128_Atom<Element>{};
      if constexpr (kChunk == 32) return Layout_K_SW64_Atom<Element>{};
    } else {
      if constexpr (kChunk == 64) return Layout_MN_SW128_Atom<Element>{};
      if constexpr (kChunk == 32) return Layout_MN_SW64_Atom<Element>{};
    }
  }
  using KMajorAtom = decltype(atom<cute::SM90::GMMA::Major::K>());
  using MnMajorAtom = decltype(atom<cute::SM90::GMMA::Major::MN>());
  using DimSize = cute::Int<kHeadDim>;
  using KeySize = cute::Int<kKeys>;
  using RowSize = cute::Int<kRows>;
  using StageSize = cute::Int<kStages>;

  using QLayout = decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<RowSize, DimSize>{}));
  using KLayout = decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<KeySize, DimSize, StageSize>{}));
  /// The layout of K seen as [dims, keys].
  using VLayout = decltype(cute::tile_to_shape(MnMajorAtom{}, cute::Shape<DimSize, KeySize, StageSize>{},
                                               cute::Step<cute::_2, cute::_1, cute::_3>{}));

  using ScoreMma = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<Element, Element, float, cute::Shape<RowSize, KeySize, DimSize>,
                                       cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>()));
  using ValueMma = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<Element, Element, float, cute::Shape<RowSize, DimSize, KeySize>,
                                       cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>()));
};

template <class C>
struct alignas(1024) SharedStorage {
  static constexpr int kTile = C::kKeys * C::kHeadDim;
  typename C::Element q[C::kConsumers][C::kRows * C::kHeadDim];
  typename C::Element k[C::kStages][kTile];
  typename C::Element v[C::kStages][kTile];
  alignas(128) std::uint8_t raw[C::kFp8 ? C::kRawStages : 1][C::kFp8 ? kTile : 128];  // [keys, head_dim]
  std::uint64_t q_full[C::kConsumers];
  std::uint64_t k_full[C::kStages];
  std::uint64_t k_empty[C::kStages];
  std::uint64_t v_full[C::kStages];
  std::uint64_t v_empty[C::kStages];
  std::uint64_t raw_full[3];
  std::uint64_t raw_empty[3];
  std::uint64_t ragged[C::kStages];  // loads of values that end within a block
};

/// Ids of named barriers (cutlass adds those it reserves).
enum NamedBarrierId : std::uint32_t { kTurn = 0, kConsumerGroup = 2 };

/// A position in a ring of `stages` buffers.
template <int stages>
struct RingState {
  int stage = 0;
  std::uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/// The keys that some query of a tile sees, in steps of kKeys from position 0, last step first.
struct KeyRange {
  int begin;  ///< first position seen
  int end;    ///< behind the last one
  int first_step;
  int last_step;

  template <class C>
  __device__ static KeyRange of(const ContextTile& tile, int window) {
    KeyRange range;
    range.begin = window > 0 ? max(0, tile.position - window + 1) : 0;
    range.end = tile.position + tile.rows;
    range.first_step = range.begin / C::kKeys;
    range.last_step = (range.end - 1) / C::kKeys;
    return range;
  }
};

/// The work of a block of the grid: items (a tile and a head; the heads of a tile are neighbours, so that those of a KV
/// head share its cache lines in L2). Items come longest first and are dealt out to and fro, so that the sums of
/// neighbours stay close.
struct Work {
  int cluster;  ///< blocks that take neighbouring items
  int round = 0;
  int head = 0;
  bool valid = false;
  ContextTile tile;

  __device__ explicit Work(int cluster_size) : cluster(cluster_size) {}

  __device__ void advance(const Parameters& p) {
    const int clusters = static_cast<int>(gridDim.x) / cluster;
    const int index = static_cast<int>(blockIdx.x) / cluster;
    do {
      const int group = round * clusters + (round % 2 == 0 ? index : clusters - 1 - index);
      const int item = group * cluster + static_cast<int>(blockIdx.x) % cluster;
      ++round;
      valid = item < p.num_items;
      if (!valid) return;
      tile = p.tiles[item / p.num_heads];
      head = item % p.num_heads;
    } while (tile.rows == 0);
  }
};

}  // namespace aotllm::cuda::context
