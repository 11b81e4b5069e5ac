#pragma once

#include "attention/decode_cluster.cuh"
#include "attention/decode_consumer.cuh"
#include "attention/decode_fresh.cuh"
#include "attention/decode_params.cuh"
#include "group_codes.cuh"
//
#include <cutlass/arch/barrier.h>

// The end of an item: the warps' results become one, then the query's ranges. Sums are written with intrinsics: the
// same code serves two places, and the compiler may not contract it differently there.
namespace aotllm::cuda {

/// Where the result of one range of one head is.
__device__ inline std::size_t range_slot(const DecodeParams& params, const DecodeStageInfo& info, int head, int range) {
  return (static_cast<std::size_t>(info.query) * params.num_heads + info.head + head) * params.max_ranges + range;
}

/// By kCodeGroup / 4 neighbouring lanes, each with four dims.
__device__ inline void store_codes(const GroupCodes& to, std::size_t row, std::size_t width, std::size_t column,
                                   float4 value) {
  constexpr int kLanes = kCodeGroup / 4;
  const unsigned mask = ((1u << kLanes) - 1) << (opaque_thread() % 32 / kLanes * kLanes);
  float largest = fmaxf(fmaxf(fabsf(value.x), fabsf(value.y)), fmaxf(fabsf(value.z), fabsf(value.w)));
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(mask, largest, step));
  const GroupScale scale(largest);
  const auto low =
      __nv_cvt_float2_to_fp8x2({value.x * scale.inverse, value.y * scale.inverse}, __NV_SATFINITE, __NV_E4M3);
  const auto high =
      __nv_cvt_float2_to_fp8x2({value.z * scale.inverse, value.w * scale.inverse}, __NV_SATFINITE, __NV_E4M3);
  *reinterpret_cast<ushort2*>(to.codes + row * width + column) = {low, high};
  if (column % kCodeGroup == 0) to.scales[column / kCodeGroup * to.scale_rows + row] = scale.scale;
}

__device__ inline void store_out(const DecodeParams& params, const DecodeStageInfo& info, int head_dim, int head,
                                 int dim, float4 value) {
  if (params.codes.codes != nullptr) {
    const auto width = static_cast<std::size_t>(params.num_heads) * head_dim;
    const auto column = static_cast<std::size_t>(info.head + head) * head_dim + dim;
    return store_codes(params.codes, static_cast<std::size_t>(info.row), width, column, value);
  }
  const std::size_t row = static_cast<std::size_t>(info.row) * params.num_heads + info.head + head;
  const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(value.x, value.y), __floats2bfloat162_rn(value.z, value.w)};
  *reinterpret_cast<uint2*>(params.out + row * head_dim + dim) = reinterpret_cast<const uint2&>(pairs);
}

/// Maximum and sum of up to 32 ranges, one per lane; neutral where there is none.
__device__ inline float2 load_range_sum(const float2* sums, int range, int ranges) {
  return range < ranges ? __ldcg(sums + range) : float2{-INFINITY, 0.0f};
}

/// Loads in flight of the combination; fewer where registers are short.
template <class Tile>
inline constexpr int kCombineBatch = Tile::kWarps == 8 ? 8 : 16;

/// One warp: all ranges of a head, in their order, to `out`.
template <int HeadDim, int Batch>
__device__ void combine_ranges(const DecodeParams& params, const DecodeStageInfo& info, int head) {
  const int lane = opaque_thread() % 32;
  const std::size_t slot = range_slot(params, info, head, 0);
  const float2* sums = params.range_sums + slot;
  const int ranges = info.ranges;
#pragma unroll
  for (int first = 0; first < HeadDim; first += 128) {
    const int dim = first + 4 * lane;
    const bool exists = dim < HeadDim;
    const float* values = params.range_values + slot * HeadDim + (exists ? dim : 0);
    float4 batch[Batch];
    const auto load = [&](int from) {
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const int range = min(from + i, ranges - 1);  // beyond the last: loaded, not used
        batch[i] = __ldcg(reinterpret_cast<const float4*>(values + static_cast<std::size_t>(range) * HeadDim));
      }
    };
    float2 own = load_range_sum(sums, lane, ranges);
    load(0);
    float maximum = own.x;
    for (int r = lane + 32; r < ranges; r += 32) maximum = fmaxf(maximum, __ldcg(sums + r).x);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    float sum = __fmul_rn(exp2f(own.x - maximum), own.y);
    for (int r = lane + 32; r < ranges; r += 32) {
      const float2 range = __ldcg(sums + r);
      sum = __fmaf_rn(exp2f(range.x - maximum), range.y, sum);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));

    float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int from = 0; from < ranges; from += Batch) {
      if (from > 0) {
        if (from % 32 == 0) own = load_range_sum(sums, from + lane, ranges);
        load(from);
      }
      const float factors = exp2f(own.x - maximum);
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const float factor = __shfl_sync(~0u, factors, (from + i) % 32);
        if (from + i < ranges) add_scaled(value, factor, batch[i]);
      }
    }
    if (exists) store_out(params, info, HeadDim, head, dim, scaled(value, __frcp_rn(sum)));
  }
}

/// Counts a finished range of the query's head tile, whose result this thread knows to be written; true for the last
/// one, which leaves the counter at zero for the next launch.
__device__ inline bool arrive_range(const DecodeParams& params, const DecodeStageInfo& info) {
  __threadfence();
  std::uint32_t* counter = params.counters + info.counter;
  const bool last = atomicAdd(counter, 1u) == static_cast<std::uint32_t>(info.ranges - 1);
  if (last) *counter = 0;
  __threadfence();
  return last;
}

/// The ring of finished ranges between consumers and the arrival warp.
struct DecodeJobs {
  DecodeStageInfo* records;
  DecodeBarriers barriers;
  int stages;
  DecodePhase phase;

  __device__ DecodeJobs(std::uint8_t* shared, const DecodeStorage& storage, int stage_count)
      : records(reinterpret_cast<DecodeStageInfo*>(shared + storage.jobs)),
        barriers{reinterpret_cast<std::uint64_t*>(shared + storage.barriers)},
        stages(stage_count) {}

  /// By all consumer threads: `record` (of which only thread 0's counts) is stored.
  __device__ void push(const DecodeStageInfo& record) {
    using Barrier = cutlass::arch::ClusterBarrier;
    if (threadIdx.x == 0) {
      Barrier::wait(barriers.taken(stages, phase.stage), phase.parity ^ 1);
      records[phase.stage] = record;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) Barrier::arrive(barriers.stored(stages, phase.stage));
    phase.advance(kDecodeJobs);
  }
  /// By all lanes of the arrival warp: pop() would not wait.
  __device__ bool ready() const {
    using Barrier = cutlass::arch::ClusterBarrier;
    return __all_sync(~0u, Barrier::test_wait(barriers.stored(stages, phase.stage), phase.parity, true));
  }
  /// Likewise.
  __device__ DecodeStageInfo pop() {
    using Barrier = cutlass::arch::ClusterBarrier;
    Barrier::wait(barriers.stored(stages, phase.stage), phase.parity);
    const DecodeStageInfo record = records[phase.stage];
    __syncwarp();
    if (threadIdx.x % 32 == 0) Barrier::arrive(barriers.taken(stages, phase.stage));
    phase.advance(kDecodeJobs);
    return record;
  }
};

/// All ranges of a query's head tile, if this was the last.
template <class Tile>
__device__ void count_range(const DecodeParams& params, const DecodeStageInfo& info) {
  bool last = false;
  if (threadIdx.x % 32 == 0) last = arrive_range(params, info);
  if (!__any_sync(~0u, last)) return;
  __threadfence();
  for (int head = 0; head < info.heads; ++head) combine_ranges<Tile::kHeadDim, kCombineBatch<Tile>>(params, info, head);
}

/// The arrival warp: until the consumers push a record without heads. In a fused launch it makes items as well, which
/// come first: consumers wait for them. `wait` waits for the kernel's predecessor.
template <class Tile, class Wait>
__device__ void run_arrivals(const DecodeParams& params, std::uint8_t* shared, const DecodeStorage& storage,
                             Wait wait) {
  DecodeJobs jobs(shared, storage, params.stages);
  DecodePreparer<Tile> preparer(params, shared, storage);
  if (params.fused) preparer.begin();
  wait();
  while (true) {
    if (preparer.pending()) {
      if (params.max_ranges == 1) preparer.wait_for_room();  // nothing is counted before the last item
      if (preparer.has_room()) {
        preparer.prepare();
        continue;
      }
      if (!jobs.ready()) {
        __nanosleep(256);  // polling takes issue slots from the consumers
        continue;
      }
    }
    const DecodeStageInfo info = jobs.pop();
    if (info.heads == 0) return;
    count_range<Tile>(params, info);
  }
}

/// What consumers do at the end of an item.
template <class Tile, int HeadTiles>
class DecodeEpilogue {
 public:
  __device__ DecodeEpilogue(const DecodeParams& params, std::uint8_t* shared, const DecodeStorage& storage)
      : params_(params),
        values_(reinterpret_cast<float*>(shared + storage.values)),
        stats_(reinterpret_cast<float2*>(shared + storage.stats)),
        flag_(reinterpret_cast<volatile int*>(shared + storage.flag)),
        jobs_(shared, storage, params.stages),
        cluster_(params, shared, storage) {}

  __device__ void finish(const DecodeStageInfo& info, DecodeState<Tile, HeadTiles>& state) {
    const int thread = opaque_thread();
    publish(info, thread, state);
    if (params_.cluster > 0 && info.ranges > 1) {
      cluster_.begin(info);
      meet();
      combine_in_cluster(info, thread);
      return;
    }
    meet();
    const bool whole = info.ranges == 1;
    for (int i = thread; i < info.heads * kPieces; i += Tile::kConsumers) {
      const int head = i / kPieces;
      const int dim = i % kPieces * 4;
      const Part part = merge_warps(info, head, dim);
      if (whole) {
        store_out(params_, info, Tile::kHeadDim, head, dim, scaled(part.value, 1.0f / part.stats.y));
      } else {
        const std::size_t slot = range_slot(params_, info, head, info.range);
        *reinterpret_cast<float4*>(params_.range_values + slot * Tile::kHeadDim + dim) = part.value;
        if (dim == 0) params_.range_sums[slot] = part.stats;
      }
    }
    if (!whole && info.final == 0) jobs_.push(info);
    meet();  // values_ and stats_ are free again, and a range's result is written
    if (whole || info.final == 0) return;
    if (thread == 0) *flag_ = arrive_range(params_, info);
    meet();
    if (*flag_ == 0) return;
    __threadfence();
    for (int head = thread / 32; head < info.heads; head += Tile::kWarps) {
      combine_ranges<Tile::kHeadDim, kCombineBatch<Tile>>(params_, info, head);
    }
  }
  /// After the last item: the arrival warp may end.
  __device__ void end() { jobs_.push(DecodeStageInfo{}); }

 private:
  static constexpr int kPieces = Tile::kHeadDim / 4;  ///< float4 of a head

  __device__ static void meet() { cutlass::arch::NamedBarrier::sync(Tile::kConsumers, 0); }

  __device__ float* values_of(int warp, int heads, int head) const {
    return values_ + (warp * heads + head) * Tile::kValueStride;
  }

  /// This warp's maximum, sum and values to shared memory.
  __device__ void publish(const DecodeStageInfo& info, int thread, const DecodeState<Tile, HeadTiles>& state) {
    const int warp = thread / 32;
    const int lane = thread % 32;
#pragma unroll
    for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int head = 8 * n + 2 * (lane % 4) + j;
        float sum = state.sum[n][j];
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane < 4) stats_[warp * 16 + head] = {state.maximum[n][j], sum};
        if (head >= info.heads) continue;
        float* to = values_of(warp, info.heads, head);
#pragma unroll
        for (int d = 0; d < Tile::kHeadDim / 16; ++d) {
          const float first = state.values[d][n][j];
          const float second = state.values[d][n][2 + j];
          if constexpr (Tile::kType == KvType::kBf16) {
            to[16 * d + lane / 4] = first;
            to[16 * d + lane / 4 + 8] = second;
          } else {
            *reinterpret_cast<float2*>(to + 16 * d + lane / 4 * 2) = {first, second};
          }
        }
      }
    }
  }

  struct Part {
    float4 value;
    float2 stats;  ///< maximum and sum
  };

  /// Four dims of a head over the warps, in their order.
  __device__ Part merge_warps(const DecodeStageInfo& info, int head, int dim) const {
    float maximum = stats_[head].x;
#pragma unroll
    for (int w = 1; w < Tile::kWarps; ++w) maximum = fmaxf(maximum, stats_[w * 16 + head].x);
    float sum = 0.0f;
    float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) {
      const float2 stats = stats_[w * 16 + head];
      const float factor = exp2f(stats.x - maximum);  // 0 for a warp without positions
      sum = __fmaf_rn(factor, stats.y, sum);
      add_scaled(value, factor, *reinterpret_cast<const float4*>(values_of(w, info.heads, head) + dim));
    }
    return {value, {maximum, sum}};
  }

  /// The only item of this CTA: its part to the cluster's first CTA, where all become the result.
  __device__ void combine_in_cluster(const DecodeStageInfo& info, int thread) const {
    for (int i = thread; i < info.heads * kPieces; i += Tile::kConsumers) {
      const Part part = merge_warps(info, i / kPieces, i % kPieces * 4);
      cluster_.put(info.range, i / kPieces, i % kPieces * 4, part.value, part.stats);
    }
    if (info.range > 0) return;
    meet();
    cluster_.wait();
    for (int i = thread; i < info.heads * kPieces; i += Tile::kConsumers) {
      const int head = i / kPieces;
      const int dim = i % kPieces * 4;
      store_out(params_, info, Tile::kHeadDim, head, dim, cluster_.combine(info.ranges, head, dim));
    }
  }

  const DecodeParams& params_;
  float* values_;
  float2* stats_;
  volatile int* flag_;
  DecodeJobs jobs_;
  DecodeCluster<Tile> cluster_;
};

}  // namespace aotllm::cuda
