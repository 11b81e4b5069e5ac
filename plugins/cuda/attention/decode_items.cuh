#pragma once

#include "attention/decode_params.cuh"

namespace aotllm::cuda {

/// The items of a CTA in their order. A warp walks them, all lanes together; the two that do come to the same.
class DecodeItems {
 public:
  __device__ explicit DecodeItems(const DecodeParams& params)
      : params_(params), lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// To the first item; valid() says whether there is one.
  __device__ void begin() { valid_ = (params_.direct ? find_item() : find_share()) && settle(); }
  __device__ void advance() {
    cursor_.advance(params_.plan);
    valid_ = settle();
  }
  __device__ bool valid() const { return valid_; }

  __device__ const DecodeQuery& entry() const { return cursor_.entry; }
  __device__ int query() const { return cursor_.query; }
  __device__ int range() const { return cursor_.range; }  ///< of ranges(), counted from the query's first
  __device__ int ranges() const { return cursor_.ranges.count; }
  __device__ int counter() const { return cursor_.query * params_.plan.head_tiles + cursor_.head_tile; }
  /// Positions [begin, end) that the item attends to lie in [range_begin, range_end).
  __device__ int begin_position() const { return cursor_.ranges.begin; }
  __device__ int range_begin() const { return (cursor_.ranges.first + cursor_.range) * params_.plan.split_tokens; }
  __device__ int range_end() const { return min(range_begin() + params_.plan.split_tokens, cursor_.entry.context); }
  __device__ bool holds_newest() const { return cursor_.range == cursor_.ranges.count - 1; }

  __device__ int kv_head() const {
    const int tiles = params_.tiles_per_kv_head;
    return tiles == 1 ? cursor_.head_tile : cursor_.head_tile / tiles;
  }
  /// The item's first query head, counted from its KV head's first.
  __device__ int head_in_group() const {
    return (cursor_.head_tile - kv_head() * params_.tiles_per_kv_head) * params_.tile_heads;
  }
  __device__ int heads() const { return min(params_.tile_heads, params_.group - head_in_group()); }

 private:
  __device__ bool settle() { return cursor_.start < share_end_ && cursor_.settle(params_.plan, params_.queries); }

  /// Sets the cursor to this CTA's item; false where the query has no such range.
  __device__ bool find_item() {
    const int query = static_cast<int>(blockIdx.z);
    cursor_.query = query;
    cursor_.entry = load_query(params_.queries + query);
    cursor_.ranges = decode_ranges(params_.plan, cursor_.entry.context);
    cursor_.head_tile = static_cast<int>(blockIdx.y);
    cursor_.range = static_cast<int>(blockIdx.x);
    share_end_ = 1;
    return cursor_.range < cursor_.ranges.count;
  }

  static constexpr int kChunks = 8;  ///< of 32 queries, whose contexts are loaded at once

  /// Of queries [first, first + 32 kChunks), lane i of chunk c has the weight of first + 32 c + i: of one head tile.
  __device__ void load_weights(int first, int (&weights)[kChunks]) const {
    int contexts[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int query = first + 32 * c + lane_;
      contexts[c] = query < params_.plan.num_queries ? __ldcg(&params_.queries[query].context) : 0;
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) weights[c] = decode_ranges(params_.plan, contexts[c]).weight;
  }

  /// Sets the cursor to the first item of this CTA's share; false where the share holds none.
  __device__ bool find_share() {
    const DecodePlan& plan = params_.plan;
    int weights[kChunks];
    long long total = 0;
    for (int first = 0; first < plan.num_queries; first += 32 * kChunks) {
      load_weights(first, weights);
      int sum = 0;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) sum += weights[c];
      total += __reduce_add_sync(~0u, sum);
    }
    total *= plan.head_tiles;
    const DecodeShare share = decode_share(total, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    if (share.begin >= share.end) return false;
    share_end_ = share.end;

    long long start = 0;
    for (int first = 0;; first += 32 * kChunks) {
      if (plan.num_queries > 32 * kChunks) load_weights(first, weights);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const long long end = start + static_cast<long long>(__reduce_add_sync(~0u, weights[c])) * plan.head_tiles;
        if (share.begin < end) {
          find_query(first + 32 * c, weights[c], start, share.begin);
          return true;
        }
        start = end;
      }
    }
  }

  /// The query among 32 from `first` on, whose items start at `start`, that holds the start `wanted`; `weight` is this
  /// lane's.
  __device__ void find_query(int first, int weight, long long start, long long wanted) {
    int through = weight;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane_ >= step) through += other;
    }
    const long long head_tiles = params_.plan.head_tiles;
    const unsigned behind = __ballot_sync(~0u, wanted < start + through * head_tiles);
    const int source = __ffs(static_cast<int>(behind)) - 1;
    const int query = first + source;
    start += __shfl_sync(~0u, through - weight, source) * head_tiles;
    cursor_.seek(params_.plan, query, load_query(params_.queries + query), start, wanted);
  }

  const DecodeParams& params_;
  int lane_;
  DecodeCursor cursor_;
  long long share_end_ = 0;
  bool valid_ = false;
};

}  // namespace aotllm::cuda
