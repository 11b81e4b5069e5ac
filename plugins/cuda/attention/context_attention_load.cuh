#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "attention/context_attention_config.cuh"

// How queries, keys and values come into shared memory.
namespace aotllm::cuda::context {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using Barrier = cutlass::arch::ClusterBarrier;

inline constexpr auto kKeep = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
inline constexpr auto kStream = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);

/// One thread: the queries of a consumer, whose buffer is free. Rows behind the tile's own are loaded too (or are zeros
/// behind the last of all): they take part in no other row's result.
template <class C>
__device__ void load_queries(const Parameters& p, SharedStorage<C>& shared, int consumer, const Work& work) {
  FullBarrier::arrive_and_expect_tx(&shared.q_full[consumer], sizeof(shared.q[consumer]));
#pragma unroll
  for (int chunk = 0; chunk < C::kChunks; ++chunk) {
    cute::SM90_TMA_LOAD_3D::copy(&p.q, &shared.q_full[consumer], kStream,
                                 &shared.q[consumer][chunk * C::kRows * C::kChunk], chunk * C::kChunk, work.head,
                                 work.tile.row + consumer * C::kRows);
  }
}

/// Where lane `lane` of the producer finds its part of a step's keys: a box of one block, or a box that lies outside
/// the pool, which TMA fills with zeros, where no query sees any of its keys (the block table need not reach there).
struct Box {
  int block;
  int token;  ///< within the block
  bool active;

  template <class C>
  __device__ static Box of(const Parameters& p, const Work& work, const KeyRange& range, int step, int index) {
    const int position = step * C::kKeys + (index << p.box_shift);
    Box box;
    box.active = index < (C::kKeys >> p.box_shift);
    box.token = position & ((1 << p.block_shift) - 1);
    box.block = p.num_blocks;
    if (box.active && position < range.end && position + (1 << p.box_shift) > range.begin) {
      const std::int64_t row = static_cast<std::int64_t>(work.tile.sequence) * p.table_stride;
      box.block = p.block_table[row + (position >> p.block_shift)];
    }
    return box;
  }
};

/// Visits the tiles of a block's work in the order in which consumers use them: K of the last step, then K of a step
/// and V of the one behind it, …, V of the first step.
template <class C, class Keys, class Values>
__device__ void for_each_tile(const Parameters& p, const Keys& keys, const Values& values) {
  Work work(C::kCluster);
  for (work.advance(p); work.valid; work.advance(p)) {
    const KeyRange range = KeyRange::of<C>(work.tile, p.window);
    keys(work, range, range.last_step);
    for (int step = range.last_step; step > range.first_step; --step) {
      keys(work, range, step - 1);
      values(work, range, step);
    }
    values(work, range, range.first_step);
  }
}

/// The producer warp of a bf16 cache: boxes go straight to where wgmma reads them. In a cluster of two blocks, which
/// work on two heads of one KV head, each loads half of the boxes, for both.
template <class C>
class Loader {
 public:
  __device__ Loader(const Parameters& p, SharedStorage<C>& shared) : p_(p), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    for_each_tile<C>(
        p_, [&](const Work& work, const KeyRange& range, int step) { load_keys(work, range, step); },
        [&](const Work& work, const KeyRange& range, int step) { load_values(work, range, step); });
  }

 private:
  __device__ void load_keys(const Work& work, const KeyRange& range, int step) {
    const Box box = Box::of<C>(p_, work, range, step, lane_ / C::kChunks);
    Barrier::wait(&shared_.k_empty[keys_.stage], keys_.phase ^ 1);
    issue(work, box, 0, &shared_.k_full[keys_.stage], shared_.k[keys_.stage]);
    keys_.advance();
  }

  /// A probability of zero does not silence what an unwritten row may hold (NaN): rows of the last block behind the
  /// context are made zeros before the consumers see them.
  __device__ void load_values(const Work& work, const KeyRange& range, int step) {
    const Box box = Box::of<C>(p_, work, range, step, lane_ / C::kChunks);
    const int stage = values_.stage;
    Barrier::wait(&shared_.v_empty[stage], values_.phase ^ 1);
    const bool ragged = step == range.last_step && (range.end & ((1 << p_.box_shift) - 1)) != 0;
    if (!ragged) {
      issue(work, box, 1, &shared_.v_full[stage], shared_.v[stage]);
    } else {
      issue(work, box, 1, &shared_.ragged[stage], shared_.v[stage]);
      Barrier::wait(&shared_.ragged[stage], ragged_phases_ >> stage & 1);
      ragged_phases_ ^= 1u << stage;
      clear_rows(shared_.v[stage], range.end - step * C::kKeys);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (lane_ == 0) Barrier::arrive(&shared_.v_full[stage]);
    }
    values_.advance();
  }

  __device__ void issue(const Work& work, const Box& box, int kv, std::uint64_t* full, typename C::Element* tile) {
    if (lane_ == 0) FullBarrier::arrive_and_expect_tx(full, C::kKeys * C::kHeadDim * sizeof(*tile));
    __syncwarp();
    if (!box.active) return;
    const int dim = lane_ % C::kChunks * C::kChunk;
    const int row = (lane_ / C::kChunks) << p_.box_shift;
    typename C::Element* to = tile + dim * C::kKeys + row * C::kChunk;
    const int kv_head = work.head / p_.group;
    if constexpr (C::kCluster == 1) {
      cute::SM90_TMA_LOAD_5D::copy(&p_.kv, full, kKeep, to, dim, box.token, kv_head, kv, box.block);
    } else if (lane_ % C::kCluster == static_cast<int>(blockIdx.x) % C::kCluster) {
      constexpr std::uint16_t kAll = (1 << C::kCluster) - 1;
      cute::SM90_TMA_LOAD_MULTICAST_5D::copy(&p_.kv, full, kAll, kKeep, to, dim, box.token, kv_head, kv, box.block);
    }
  }

  /// Rows [row, end of its box): the boxes behind were filled with zeros.
  __device__ void clear_rows(typename C::Element* tile, int row) {
    constexpr int kPieces = C::kChunk * 2 / 16;  // of 16 bytes in a row of a panel
    const int rows = (((row >> p_.box_shift) + 1) << p_.box_shift) - row;
    for (int i = lane_; i < rows * kPieces * C::kChunks; i += 32) {
      const int chunk = i / (rows * kPieces);
      const int piece = i % (rows * kPieces);
      reinterpret_cast<uint4*>(tile + (chunk * C::kKeys + row) * C::kChunk)[piece] = uint4{0, 0, 0, 0};
    }
  }

  const Parameters& p_;
  SharedStorage<C>& shared_;
  const int lane_;
  RingState<C::kStages> keys_;
  RingState<C::kStages> values_;
  std::uint32_t ragged_phases_ = 0;  // a bit for each stage
};

/// The first producer warp of an FP8 cache: codes come into a ring of raw tiles.
template <class C>
class RawLoader {
 public:
  __device__ RawLoader(const Parameters& p, SharedStorage<C>& shared)
      : p_(p), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    for_each_tile<C>(
        p_, [&](const Work& work, const KeyRange& range, int step) { load(work, range, step, 0); },
        [&](const Work& work, const KeyRange& range, int step) { load(work, range, step, 1); });
  }

 private:
  __device__ void load(const Work& work, const KeyRange& range, int step, int kv) {
    const Box box = Box::of<C>(p_, work, range, step, lane_);
    std::uint64_t* full = &shared_.raw_full[raw_.stage];
    Barrier::wait(&shared_.raw_empty[raw_.stage], raw_.phase ^ 1);
    if (lane_ == 0) FullBarrier::arrive_and_expect_tx(full, C::kKeys * C::kHeadDim);
    __syncwarp();
    if (box.active) {
      cute::SM90_TMA_LOAD_5D::copy(&p_.kv, full, kKeep, shared_.raw[raw_.stage] + (lane_ << p_.box_shift) * C::kHeadDim,
                                   0, box.token, work.head / p_.group, kv, box.block);
    }
    raw_.advance();
  }

  const Parameters& p_;
  SharedStorage<C>& shared_;
  const int lane_;
  RingState<C::kRawStages> raw_;
};

/// Two E4M3 codes (the low half of `codes`) as fp16, exactly.
__device__ inline std::uint32_t fp8_to_half(std::uint32_t codes) {
  std::uint32_t halves;
  asm("{.reg .b16 pair; cvt.u16.u32 pair, %1; cvt.rn.f16x2.e4m3x2 %0, pair;}" : "=r"(halves) : "r"(codes));
  return halves;
}

/// The other three producer warps of an FP8 cache: they convert raw tiles to fp16 where wgmma reads them. fp16 holds
/// all of E4M3, in one instruction for two codes; queries and probabilities become fp16 too.
template <class C>
class Converter {
 public:
  static constexpr int kThreads = 96;

  __device__ Converter(const Parameters& p, SharedStorage<C>& shared)
      : p_(p), shared_(shared), thread_(static_cast<int>(threadIdx.x) - 32) {}

  __device__ void run() {
    for_each_tile<C>(
        p_,
        [&](const Work&, const KeyRange& range, int step) {
          fill(shared_.k_empty, shared_.k_full, shared_.k, keys_, range.end - step * C::kKeys);
        },
        [&](const Work&, const KeyRange& range, int step) {
          fill(shared_.v_empty, shared_.v_full, shared_.v, values_, range.end - step * C::kKeys);
        });
  }

 private:
  __device__ void fill(std::uint64_t* empty, std::uint64_t* full, typename C::Element (*tiles)[C::kKeys * C::kHeadDim],
                       RingState<C::kStages>& ring, int rows) {
    FullBarrier::wait(&shared_.raw_full[raw_.stage], raw_.phase);
    Barrier::wait(&empty[ring.stage], ring.phase ^ 1);
    convert(shared_.raw[raw_.stage], tiles[ring.stage], rows);
    Barrier::arrive(&shared_.raw_empty[raw_.stage]);
    cutlass::arch::fence_view_async_shared();
    Barrier::arrive(&full[ring.stage]);
    ring.advance();
    raw_.advance();
  }

  /// `raw` [keys, head_dim] to panels; rows from `rows` on become zeros, whatever they hold.
  __device__ void convert(const std::uint8_t* raw, typename C::Element* tile, int rows) {
    constexpr int kPieces = C::kHeadDim / 16;  // of 16 codes in a row
    constexpr int kAll = C::kKeys * kPieces;
    constexpr int kBatch = 6;  // loads in flight: the compiler moves none over the stores of another piece
#pragma unroll 1
    for (int first = thread_; first < kAll; first += kBatch * kThreads) {
      uint4 codes[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = first + i * kThreads;
        codes[i] = uint4{0, 0, 0, 0};
        if (index < kAll && index / kPieces < rows) codes[i] = reinterpret_cast<const uint4*>(raw)[index];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = first + i * kThreads;
        if (index < kAll) store(codes[i], tile, index / kPieces, index % kPieces * 16);
      }
    }
  }

  __device__ static void store(const uint4& codes, typename C::Element* tile, int row, int dim) {
    constexpr int kRowBytes = C::kChunk * 2;
    uint4 low{fp8_to_half(codes.x), fp8_to_half(codes.x >> 16), fp8_to_half(codes.y), fp8_to_half(codes.y >> 16)};
    uint4 high{fp8_to_half(codes.z), fp8_to_half(codes.z >> 16), fp8_to_half(codes.w), fp8_to_half(codes.w >> 16)};
    const int chunk = dim / C::kChunk;
    const int swizzle = kRowBytes == 128 ? row % 8 : row / 2 % 4;
    const int piece = dim % C::kChunk / 8;
    auto* out = reinterpret_cast<std::uint8_t*>(tile) + (chunk * C::kKeys + row) * kRowBytes;
    // Lanes of every second panel write their second piece first: the panels meet in the same banks.
    const bool second_first = chunk % 2 == 1;
    *reinterpret_cast<uint4*>(out + ((piece | second_first) ^ swizzle) * 16) = second_first ? high : low;
    *reinterpret_cast<uint4*>(out + ((piece | !second_first) ^ swizzle) * 16) = second_first ? low : high;
  }

  const Parameters& p_;
  SharedStorage<C>& shared_;
  const int thread_;
  RingState<C::kRawStages> raw_;
  RingState<C::kStages> keys_;
  RingState<C::kStages> values_;
};

/// A consumer's own queries from bf16 to fp16, in place. Called by its warpgroup once they are there.
template <class C>
__device__ void convert_queries(typename C::Element* q, int thread, std::uint32_t barrier) {
  auto* pieces = reinterpret_cast<uint4*>(q);
#pragma unroll 4
  for (int i = thread; i < C::kRows * C::kHeadDim / 8; i += 128) {
    uint4 words = pieces[i];
    for (std::uint32_t* word : {&words.x, &words.y, &words.z, &words.w}) {
      const float2 pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(*word));
      const __half2 halves = __floats2half2_rn(pair.x, pair.y);
      *word = reinterpret_cast<const std::uint32_t&>(halves);
    }
    pieces[i] = words;
  }
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(128, barrier);
}

}  // namespace aotllm::cuda::context
