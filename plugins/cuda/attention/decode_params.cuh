#pragma once

#ifndef CUTLASS_ENABLE_GDC_FOR_SM90
#define CUTLASS_ENABLE_GDC_FOR_SM90
#endif

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/decode_schedule.h"
#include "elementwise/rope_rotation.cuh"

// What the parts of the decode attention kernel share: its parameters, the shapes of its tiles, its shared memory.
//
// A CTA is one or two teams of 4 or 8 consumer warps, a producer warp and an arrival warp. The producer walks the CTA's
// items and streams their K and V through a ring of stages (TMA, swizzled); consumers need nothing but what a stage
// holds: K, V, the queries, a record of what it is. Warp w of a team takes the positions 16 w … 16 w + 15 of its tiles,
// with its own running maximum and sum, so that warps meet only at the end of an item. Where a query has several
// ranges, the arrival warp counts the finished ones, and combines them where this CTA's was the last: neither delays
// the next item.
//
// A fused launch has rope_kv's work to do as well: the arrival warp makes an item's queries and the new token's key and
// value ahead of it, in a ring of their own, and writes the latter to the cache; the consumer warp whose slab holds the
// new token reads them there instead of in the tile, whose row was loaded as it was before the step.
namespace aotllm::cuda {

inline constexpr int kDecodeSlab = 16;              ///< positions of a tile that one warp works on
inline constexpr int kDecodeJobs = 4;               ///< finished ranges that may wait for the arrival warp
inline constexpr int kDecodePrepared = 2;           ///< items whose queries may be ready ahead
inline constexpr int kDecodeMaxCluster = 8;         ///< ranges that a cluster may combine
inline constexpr int kDecodeSmallBox = 16;          ///< positions of a TMA box of a tile that is attended to in part
inline constexpr int kDecodeMaxCounters = 1 << 16;  ///< queries · head tiles of a launch whose contexts are split

struct DecodeParams {
  const __nv_bfloat16* q;
  __nv_bfloat16* out;
  GroupCodes codes;  ///< in place of `out`
  const DecodeQuery* queries;
  const std::int32_t* block_table;
  std::uint32_t* counters;  ///< [queries · head tiles], zero between launches
  float2* range_sums;       ///< [queries, heads, max_ranges]: maximum (log2) and sum of each range
  float* range_values;      ///< [queries, heads, max_ranges, head_dim]: weighted sums of V, relative to that maximum
  DecodePlan plan;
  int table_stride;
  int block_shift;  ///< log2 tokens_per_block
  int max_ranges;
  int num_heads;
  int group;       ///< query heads of a KV head
  int tile_heads;  ///< query heads of a head tile; its last tile of a KV head may hold fewer
  int tiles_per_kv_head;
  int box_tokens;  ///< positions of one TMA box: divides tokens_per_block and 64, at least 16
  int stages;
  int cluster;        ///< CTAs of a query's ranges that combine them among themselves; 0 = none do
  bool direct;        ///< one item for each CTA of a grid [ranges, head tiles, queries]
  bool fused;         ///< q is made here, of rope.qkv
  float score_scale;  ///< scale · log2 e, or 2 log2 e · scale / softcap
  float cap;          ///< softcap · log2 e, or 0
  HeadLayout layout;  ///< where fused
  RopeKvArgs rope;
};

/// Of the cache: boxes of params.box_tokens, and of kDecodeSmallBox.
struct DecodeMaps {
  CUtensorMap large;
  CUtensorMap small;
};

/// What a stage holds, written by the producer. There are two records per stage, for its even and odd rounds, so that
/// one stays readable until a warp is through with the tile (K is given back earlier).
struct alignas(16) DecodeStageInfo {
  std::int32_t heads = 0;  ///< query heads of the item; 0 ends the CTA's work
  std::int32_t begin = 0;  ///< attended to are positions [begin, end) of this tile, relative to its first
  std::int32_t end = 0;
  std::int32_t tile = 0;  ///< counted from the item's first, whose stage holds its queries, too
  std::int32_t last = 0;  ///< the item's last tile
  std::int32_t row = 0;   ///< of q and out
  std::int32_t head = 0;  ///< the item's first query head
  std::int32_t query = 0;
  std::int32_t range = 0;  ///< of the query's `ranges`
  std::int32_t ranges = 0;
  std::int32_t counter = 0;  ///< of this query and head tile
  std::int32_t final = 0;    ///< the item is the CTA's last
};

/// `Teams`: groups of consumer warps that take tiles in turn, so that the latency of one hides behind another's.
template <KvType Type, int HeadDim, int Teams>
struct DecodeTile {
  static constexpr KvType kType = Type;
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kRowBytes = HeadDim * static_cast<int>(element_bytes(Type));
  /// Rows are cut into columns that TMA swizzles: 16-byte chunk c of row r of a column lies at chunk c ^ (r / f) % n.
  static constexpr int kColumnBytes = kRowBytes % 128 == 0 ? 128 : kRowBytes % 64 == 0 ? 64 : 32;
  static constexpr int kColumns = kRowBytes / kColumnBytes;
  static constexpr int kColumnChunks = kColumnBytes / 16;
  static constexpr int kTokens = kRowBytes <= 128 ? 128 : 64;
  static constexpr int kTeams = Teams;
  static constexpr int kSlabs = kTokens / kDecodeSlab;  ///< warps of a team
  static constexpr int kWarps = Teams * kSlabs;         ///< consumers
  static constexpr int kConsumers = 32 * kWarps;
  static constexpr int kThreads = kConsumers + 64;
  static constexpr int kUnitBytes = kTokens * kRowBytes;  ///< K or V of a tile
  /// Rows of queries and of partial results are padded so that eight rows at one column hit different banks.
  static constexpr int kQueryStride = HeadDim * 2 + 16;  ///< bytes
  static constexpr int kValueStride = HeadDim + 4;       ///< floats
  static_assert(kUnitBytes % 1024 == 0);
  static_assert(kColumns * (kTokens / kDecodeSmallBox) <= 32);  // a lane for each box
  static constexpr int prepared_bytes(int heads) { return heads * kQueryStride + 2 * kRowBytes; }

  /// Byte offset of row `row` of a column, and what its chunk numbers are XORed with (in bytes).
  __device__ static constexpr int row_offset(int row) { return row * kColumnBytes; }
  __device__ static constexpr int row_swizzle(int row) { return ((row / (8 / kColumnChunks)) % kColumnChunks) * 16; }
};

/// Offsets in dynamic shared memory, bytes.
struct DecodeStorage {
  int queries;   ///< of each stage
  int prepared;  ///< where fused: [kDecodePrepared] of queries, then the new token's K and V
  int rotation;  ///< likewise
  int parts;     ///< of a cluster's ranges, in its first CTA
  int values;
  int stats;
  int infos;
  int jobs;
  int barriers;
  int flag;
  int total;
};
constexpr int decode_barriers(int stages) {
  return stages * 4 + kDecodeJobs * 2 + kDecodePrepared * 2 + 1;
}
template <class Tile>
constexpr DecodeStorage decode_storage(int stages, int heads, bool fused, bool clustered) {
  DecodeStorage s{};
  int at = stages * 2 * Tile::kUnitBytes;
  s.queries = at, at += fused ? 0 : stages * heads * Tile::kQueryStride;
  s.prepared = at, at += fused ? kDecodePrepared * Tile::prepared_bytes(heads) : 0;
  s.rotation = at, at += fused ? Tile::kHeadDim / 2 * static_cast<int>(sizeof(float2)) : 0;
  s.parts = at, at += clustered ? kDecodeMaxCluster * heads * (Tile::kHeadDim * 4 + 8) : 0;
  s.values = at, at += Tile::kWarps * heads * Tile::kValueStride * 4;
  s.stats = at, at += Tile::kWarps * 16 * 8;
  s.infos = at, at += 2 * stages * static_cast<int>(sizeof(DecodeStageInfo));
  s.jobs = at, at += kDecodeJobs * static_cast<int>(sizeof(DecodeStageInfo));
  s.barriers = at, at += decode_barriers(stages) * 8;
  s.flag = at, at += 16;
  s.total = at;
  return s;
}

/// threadIdx.x, of which the compiler cannot know that it stays the same: addresses that follow from it are not
/// computed ahead of the loop over tiles, where they would fill registers that the products need.
__device__ inline int opaque_thread() {
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));
  return thread;
}

__device__ inline std::uint32_t shared_address(const void* address) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(address));
}

/// The barriers of stages, jobs, prepared items; then that of a cluster's parts.
struct DecodeBarriers {
  std::uint64_t* base;
  __device__ std::uint64_t* full_k(int stage) const { return base + 4 * stage; }
  __device__ std::uint64_t* full_v(int stage) const { return base + 4 * stage + 1; }
  __device__ std::uint64_t* empty_k(int stage) const { return base + 4 * stage + 2; }
  __device__ std::uint64_t* empty_v(int stage) const { return base + 4 * stage + 3; }
  __device__ std::uint64_t* stored(int stages, int job) const { return base + 4 * stages + 2 * job; }
  __device__ std::uint64_t* taken(int stages, int job) const { return base + 4 * stages + 2 * job + 1; }
  __device__ std::uint64_t* parts(int stages) const { return base + decode_barriers(stages) - 1; }
  __device__ std::uint64_t* ready(int stages, int slot) const { return stored(stages, kDecodeJobs + slot); }
  __device__ std::uint64_t* used(int stages, int slot) const { return taken(stages, kDecodeJobs + slot); }
};

/// A place in the ring: stage, and parity of how often it went round.
struct DecodePhase {
  int stage = 0;
  std::uint32_t parity = 0;
  /// Of what there are two of per stage.
  __device__ int double_index() const { return 2 * stage + static_cast<int>(parity); }
  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace aotllm::cuda
