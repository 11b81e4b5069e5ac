#include <algorithm>

#include "aotllm/errors.h"
#include "attention/decode_launch.h"
#include "sm80/attention.h"
#include "sm80/attention_tile.cuh"

namespace aotllm::cuda::sm80 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = 16;   // of a tile: each warp has its own
constexpr int kStages = 2;  // tiles of a warp
constexpr int kMostHeads = 16;

struct Partials : DecodeRangeResults {
  int ranges = 1;  ///< 1 = none: results are written at once
};

/// Shared memory: queries, the ring of each warp, then, in the place of the rings, what warps have found.
template <int kHeadDim>
struct Layout {
  static constexpr int kTile = kKeys * kPitch<kHeadDim>;
  static constexpr int kRing = kStages * 2 * kTile;  ///< of a warp
  static constexpr int kQueries = kMostHeads * kPitch<kHeadDim>;
  static constexpr int kFound = kMostHeads * (kHeadDim + 4) * 4;  ///< of a warp
  static constexpr int kBytes = kQueries + kWarps * std::max(kRing, kFound) + kWarps * kMostHeads * 8;
};

/// out = Σ values · 2^(maximum − largest) / Σ sums · 2^(maximum − largest) over `count` parts, in their order.
struct Merge {
  float largest = -INFINITY;
  float sum = 0.0f;

  template <class Sums>
  __device__ Merge(int count, const Sums& sums) {
    for (int i = 0; i < count; ++i) largest = fmaxf(largest, sums(i).x);
    for (int i = 0; i < count; ++i) sum += sums(i).y * weight(sums(i));
  }
  __device__ float weight(float2 part) const { return part.x == -INFINITY ? 0.0f : exp2f(part.x - largest); }
};

/// Grid: (ranges, tiles of heads, queries). Warps take tiles of 16 positions in turns, counted from position 0, each
/// through a ring of its own, and meet at the end.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ DecodeAttentionArgs args,
                                                          const Scale scale, const Partials partials, int tile_heads) {
  using L = Layout<kHeadDim>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const DecodeQuery query = args.queries[blockIdx.z];
  const int first_seen = args.window > 0 ? max(0, query.context - args.window) : 0;
  const int range = static_cast<int>(blockIdx.x);
  const int begin = range * args.split_tokens;
  const Range seen{max(begin, first_seen), min(begin + args.split_tokens, query.context)};
  if (seen.begin >= seen.end) return;  // of padding, too
  const int group = args.num_heads / args.kv.num_kv_heads;
  const int tiles = (group + tile_heads - 1) / tile_heads;
  const int kv_head = static_cast<int>(blockIdx.y) / tiles;
  const int head_of_group = static_cast<int>(blockIdx.y) % tiles * tile_heads;
  const int heads = min(tile_heads, group - head_of_group);
  const int head = kv_head * group + head_of_group;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;

  for (int i = thread; i < kMostHeads * kHeadDim / 8; i += kThreads) {
    const int row = i / (kHeadDim / 8);
    const int piece = i % (kHeadDim / 8);
    const std::size_t at = (static_cast<std::size_t>(query.row) * args.num_heads + head + row) * kHeadDim + piece * 8;
    copy16(shared + row * kPitch<kHeadDim> + piece * 16, args.q + (row < heads ? at : 0), row < heads);
  }
  cute::cp_async_fence();

  const PagedHead cache(args.kv, query.sequence, kv_head);
  std::uint8_t* ring = shared + L::kQueries + warp * L::kRing;
  const auto load = [&](int stage, int first) {
    if (first < seen.end) {
      std::uint8_t* to = ring + stage * 2 * L::kTile;
      load_rows<kHeadDim, kKeys, 32>(to, cache, false, first, seen, lane);
      load_rows<kHeadDim, kKeys, 32>(to + L::kTile, cache, true, first, seen, lane);
    }
    cute::cp_async_fence();
  };
  constexpr int kStride = kWarps * kKeys;
  int first = seen.begin / kStride * kStride + warp * kKeys;
  if (first + kKeys <= seen.begin) first += kStride;
  for (int stage = 0; stage < kStages; ++stage) load(stage, first + stage * kStride);
  cute::cp_async_wait<kStages>();
  __syncthreads();  // queries are there

  WarpRows<kHeadDim, kKeys> rows;
  for (int stage = 0; first < seen.end; first += kStride, stage = stage + 1 == kStages ? 0 : stage + 1) {
    cute::cp_async_wait<kStages - 1>();
    __syncwarp();
    const std::uint8_t* k = ring + stage * 2 * L::kTile;
    typename WarpRows<kHeadDim, kKeys>::Scores scores = {};
    rows.multiply(scores, shared, k);
    rows.weigh(scores, scale, first >= seen.begin && first + kKeys <= seen.end,
               [&](int, int key) { return seen.has(first + key); });
    rows.add(scores, k + L::kTile);
    __syncwarp();  // all lanes have read
    load(stage, first + kStages * kStride);
  }
  cute::cp_async_wait<0>();
  __syncthreads();  // rings become memory for what was found

  auto* found = reinterpret_cast<float*>(shared + L::kQueries);                          // [warps][heads][kHeadDim + 4]
  auto* sums = reinterpret_cast<float2*>(shared + L::kBytes - kWarps * kMostHeads * 8);  // [warps][heads]
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int at = warp * kMostHeads + lane / 4 + 8 * row;
    const float total = rows.total(row);
    if (lane % 4 == 0) sums[at] = {rows.maximum[row], total};
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; ++d) {
      *reinterpret_cast<float2*>(found + at * (kHeadDim + 4) + 8 * d + lane % 4 * 2) = {rows.values[d][2 * row],
                                                                                        rows.values[d][2 * row + 1]};
    }
  }
  __syncthreads();
  for (int i = thread; i < heads * kHeadDim; i += kThreads) {
    const int row = i / kHeadDim;
    const int dim = i % kHeadDim;
    const auto sums_of = [&](int part) { return sums[part * kMostHeads + row]; };
    const Merge merge(kWarps, sums_of);
    float value = 0.0f;
    for (int part = 0; part < kWarps; ++part) {
      value += found[(part * kMostHeads + row) * (kHeadDim + 4) + dim] * merge.weight(sums_of(part));
    }
    if (partials.ranges == 1) {
      args.out[(static_cast<std::size_t>(query.row) * args.num_heads + head + row) * kHeadDim + dim] =
          __float2bfloat16_rn(value / merge.sum);
      continue;
    }
    const std::size_t at =
        (static_cast<std::size_t>(blockIdx.z) * args.num_heads + head + row) * partials.ranges + range;
    partials.values[at * kHeadDim + dim] = value;
    if (dim == 0) partials.sums[at] = {merge.largest, merge.sum};
  }
}

/// Grid: (heads, queries), a thread for each dimension: the ranges of a query that were seen, in their order.
__global__ void merge_kernel(const __grid_constant__ DecodeAttentionArgs args, const Partials partials) {
  const DecodeQuery query = args.queries[blockIdx.y];
  if (query.context == 0) return;
  const int first_seen = args.window > 0 ? max(0, query.context - args.window) : 0;
  const int begin = first_seen / args.split_tokens;
  const int count = (query.context + args.split_tokens - 1) / args.split_tokens - begin;
  const std::size_t at = (static_cast<std::size_t>(blockIdx.y) * args.num_heads + blockIdx.x) * partials.ranges + begin;
  const auto sums_of = [&](int part) { return __ldcg(partials.sums + at + part); };
  const Merge merge(count, sums_of);
  const int head_dim = static_cast<int>(blockDim.x);
  float value = 0.0f;
  for (int part = 0; part < count; ++part) {
    value += __ldcg(partials.values + (at + part) * head_dim + threadIdx.x) * merge.weight(sums_of(part));
  }
  args.out[(static_cast<std::size_t>(query.row) * args.num_heads + blockIdx.x) * head_dim + threadIdx.x] =
      __float2bfloat16_rn(value / merge.sum);
}

template <int kHeadDim>
void launch_head_dim(const DecodeAttentionArgs& args, const Partials& partials, const Stream& stream) {
  constexpr int kBytes = Layout<kHeadDim>::kBytes;
  check(cudaFuncSetAttribute(decode_kernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "shared memory of decode attention");
  const int group = args.num_heads / args.kv.num_kv_heads;
  const int tiles = (group + kMostHeads - 1) / kMostHeads;
  const int tile_heads = (group + tiles - 1) / tiles;
  launch(decode_kernel<kHeadDim>,
         dim3(static_cast<unsigned>(partials.ranges), static_cast<unsigned>(args.kv.num_kv_heads * tiles),
              static_cast<unsigned>(args.num_queries)),
         dim3(kThreads), kBytes, stream, args, Scale(args.scale, args.softcap), partials, tile_heads);
}

}  // namespace

void decode_attention(const DecodeAttentionArgs& args, const Stream& stream) {
  if (args.num_queries <= 0 || args.max_context <= 0) return;
  check_decode_args(args);
  check_bf16(args.kv);
  if (args.fused != nullptr) throw Error(ErrorKind::kInternal, "decode attention: nothing can be fused before SM90");
  Partials partials;
  partials.ranges = (args.max_context + args.split_tokens - 1) / args.split_tokens;
  if (partials.ranges > 1) static_cast<DecodeRangeResults&>(partials) = decode_range_results(args);
  switch (args.kv.head_dim) {
    case 64:
      launch_head_dim<64>(args, partials, stream);
      break;
    case 96:
      launch_head_dim<96>(args, partials, stream);
      break;
    case 128:
      launch_head_dim<128>(args, partials, stream);
      break;
    default:
      launch_head_dim<256>(args, partials, stream);
  }
  if (partials.ranges == 1) return;
  launch(merge_kernel, dim3(static_cast<unsigned>(args.num_heads), static_cast<unsigned>(args.num_queries)),
         dim3(static_cast<unsigned>(args.kv.head_dim)), 0, stream, args, partials);
}

}  // namespace aotllm::cuda::sm80
