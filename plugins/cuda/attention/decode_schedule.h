#pragma once

#include <cstdint>

#include "attention/attention.h"

#ifdef __CUDACC__
#define AOTLLM_HOST_DEVICE __host__ __device__ inline
#else
#define AOTLLM_HOST_DEVICE inline
#endif

// How decode attention is cut into items of work, and which CTA does which: pure index algebra, tested on the CPU.
//
// An item is one range of `split_tokens` positions of one query, for one head tile (up to 16 query heads of one KV
// head). Items are numbered query by query, in a query head tile by head tile, in a head tile range by range. Each item
// has a nominal weight in tiles of loads, and a CTA takes the items that begin in its share of the sum of all weights.
namespace aotllm::cuda {

struct DecodePlan {
  int num_queries = 0;
  int head_tiles = 0;    ///< num_kv_heads · tiles per KV head
  int split_tokens = 0;  ///< a multiple of 64
  int tile_shift = 0;    ///< log2 of the positions that one stage of the pipeline holds
  int window = 0;
  int full_weight = 0;           ///< weight of every range of a query but its last
  std::uint32_t reciprocal = 0;  ///< ⌈2^32 / (split_tokens / 64)⌉, or 0 where split_tokens is 64

  /// Sets what follows from split_tokens and tile_shift.
  void derive() {
    const std::uint32_t units = static_cast<std::uint32_t>(split_tokens) / 64;
    reciprocal = units == 1 ? 0 : static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + units - 1) / units);
    full_weight = ((split_tokens - 1) >> tile_shift) + 2;  // an item costs about a tile beside its tiles
  }
};
inline constexpr int kDecodeMaxContext = 1 << 21;  ///< up to here `range_of` is exact

/// Number of the range that holds a position.
AOTLLM_HOST_DEVICE int range_of(const DecodePlan& plan, int position) {
  const std::uint32_t unit = static_cast<std::uint32_t>(position) / 64;
  if (plan.reciprocal == 0) return static_cast<int>(unit);
  return static_cast<int>(static_cast<std::uint64_t>(unit) * plan.reciprocal >> 32);
}

/// The ranges that one query attends to.
struct DecodeRanges {
  int begin = 0;   ///< first position attended to; the last is context − 1
  int first = 0;   ///< first range that holds any of them
  int count = 0;   ///< 0 for a padding query
  int weight = 0;  ///< of one head tile
};

AOTLLM_HOST_DEVICE DecodeRanges decode_ranges(const DecodePlan& plan, int context) {
  DecodeRanges ranges;
  if (context <= 0) return ranges;
  const int last = range_of(plan, context - 1);
  if (plan.window > 0 && context > plan.window) {
    ranges.begin = context - plan.window;
    ranges.first = range_of(plan, ranges.begin);
  }
  ranges.count = last - ranges.first + 1;
  const int tail_tokens = context - last * plan.split_tokens;
  ranges.weight = (ranges.count - 1) * plan.full_weight + ((tail_tokens - 1) >> plan.tile_shift) + 2;
  return ranges;
}

/// a / b for a ≥ 0, by 32-bit division where that is enough: 64 bits take a microsecond.
AOTLLM_HOST_DEVICE long long divide(long long a, int b) {
  if (a >> 31 == 0) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}

/// The share [begin, end) of CTA `index` of `count`.
struct DecodeShare {
  long long begin = 0;
  long long end = 0;
};
AOTLLM_HOST_DEVICE DecodeShare decode_share(long long total_weight, int index, int count) {
  return {divide(total_weight * index, count), divide(total_weight * (index + 1), count)};
}

/// Step data: on the device, read past the L1.
AOTLLM_HOST_DEVICE DecodeQuery load_query(const DecodeQuery* query) {
#ifdef __CUDA_ARCH__
  return {__ldcg(&query->row), __ldcg(&query->sequence), __ldcg(&query->context)};
#else
  return *query;
#endif
}

/// A place in the numbering of items. `start` is the sum of the weights before it.
struct DecodeCursor {
  int query = 0;
  int head_tile = 0;
  int range = 0;  ///< counted from the query's first
  long long start = 0;
  DecodeQuery entry;
  DecodeRanges ranges;

  /// The first item of `query` (no padding, whose items start at `query_start`) that starts at or after `weight`; past
  /// the query's last item where there is none: then settle() goes on.
  AOTLLM_HOST_DEVICE void seek(const DecodePlan& plan, int new_query, const DecodeQuery& new_entry,
                               long long query_start, long long weight) {
    query = new_query;
    entry = new_entry;
    ranges = decode_ranges(plan, entry.context);
    const int full = plan.full_weight;
    const long long inside = weight > query_start ? weight - query_start : 0;
    head_tile = static_cast<int>(divide(inside, ranges.weight));
    range = (static_cast<int>(inside - static_cast<long long>(head_tile) * ranges.weight) + full - 1) / full;
    if (range >= ranges.count) {
      range = 0;
      ++head_tile;
    }
    start = query_start + static_cast<long long>(head_tile) * ranges.weight + static_cast<long long>(range) * full;
  }

  AOTLLM_HOST_DEVICE void advance(const DecodePlan& plan) {
    if (++range < ranges.count) {
      start += plan.full_weight;
      return;
    }
    start += ranges.weight - static_cast<long long>(range - 1) * plan.full_weight;
    range = 0;
    ++head_tile;
  }

  /// Moves from the end of a query to the first item of the next one; false where there is none.
  AOTLLM_HOST_DEVICE bool settle(const DecodePlan& plan, const DecodeQuery* queries) {
    if (ranges.count > 0 && head_tile < plan.head_tiles) return true;
    while (++query < plan.num_queries) {
      entry = load_query(queries + query);
      ranges = decode_ranges(plan, entry.context);
      head_tile = 0;
      range = 0;
      if (ranges.count > 0) return true;
    }
    return false;
  }
};

}  // namespace aotllm::cuda
