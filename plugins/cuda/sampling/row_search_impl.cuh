#pragma once

#include "sampling/row_search.cuh"

// The searches. Loops stay loops where nothing is gained: a row runs through this code once, and fetches it first.

namespace aotllm::cuda::row_search {

/// Keys of the block's part of `row`, to their slots.
template <int kBlocks>
__device__ void Row<kBlocks>::read(const float* row) {
  const int rank = static_cast<int>(cluster().block_rank());
  const int thread = static_cast<int>(threadIdx.x);
  const RowSplit split(row, vocab_size_, rank, kBlocks);
  first_ = split.head + 4 * split.begin - 4;
  if (thread < 4) {
    const int id = first_ + thread;
    keys_[thread] = rank == 0 && id >= 0 ? key_of(row[id]) : 0;
  }
  constexpr int kBatch = 8;  // loads in flight
  const float4* body = reinterpret_cast<const float4*>(row + split.head);
  for (int begin = split.begin + thread; begin < split.end; begin += kBatch * kThreads) {
    float4 logits[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (begin + i * kThreads < split.end) logits[i] = __ldcs(body + begin + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int unit = begin + i * kThreads;
      if (unit >= split.end) break;
      *reinterpret_cast<uint4*>(keys_ + 4 + 4 * (unit - split.begin)) = {key_of(logits[i].x), key_of(logits[i].y),
                                                                         key_of(logits[i].z), key_of(logits[i].w)};
    }
  }
  for (int slot = 4 + 4 * (split.end - split.begin) + thread; slot < num_slots_; slot += kThreads) {
    const int id = first_ + slot;
    keys_[slot] = rank == kBlocks - 1 && id < vocab_size_ ? key_of(row[id]) : 0;
  }
  __syncthreads();
}

/// Applies mask and penalties to the block's part.
template <int kBlocks>
__device__ void Row<kBlocks>::adjust(const Adjustment& adjustment) {
#pragma unroll 1
  for (int slot = static_cast<int>(threadIdx.x); slot < num_slots_; slot += kThreads) {
    const std::uint32_t key = keys_[slot];
    if (key != 0) keys_[slot] = adjustment(key, first_ + slot);
  }
  __syncthreads();
}

template <int kBlocks>
__device__ std::uint64_t Row<kBlocks>::best() {
  const int rank = static_cast<int>(cluster().block_rank());
  const int thread = static_cast<int>(threadIdx.x);
  std::uint32_t best_key = 0;
  int best_id = 0;
  for_each(1, [&](std::uint32_t key, int id) {  // a thread sees its tokens in order of ids
    if (key > best_key) {
      best_key = key;
      best_id = id;
    }
  });
  best_key_ = best_key;
  const std::uint64_t place = best_key == 0 ? 0 : place_of(best_key, best_id);
  const std::uint64_t best_of_warp = warp_max(place);
  if (thread % 32 == 0) s_.scratch[thread / 32] = best_of_warp;
  __syncthreads();
  if (thread < 32) {
    const std::uint64_t best_of_block = warp_max(thread < kWarps ? s_.scratch[thread] : 0);
    if (thread < kBlocks) *cluster().map_shared_rank(&s_.exchange[rank], thread) = best_of_block;
  }
  cluster().sync();
  std::uint64_t best = 0;
  for (int block = 0; block < kBlocks; ++block) best = max(best, s_.exchange[block]);
  return best;
}

template <int kBlocks>
__device__ Prefix Row<kBlocks>::find(bool by_mass, std::uint64_t target, const Bins& bins, const Weights& weights,
                                     std::uint32_t floor) {
  const int bin = crossing_bin(s_.row, by_mass, target);
  const uint2 keys = keys_of(bin, bins, floor);
  Interval interval;
  interval.low = static_cast<std::uint64_t>(keys.x) << kIdBits;
  interval.high = static_cast<std::uint64_t>(keys.y) << kIdBits | kIdMask;
  interval.count = s_.row.count[bin];
  if (bin > 0) {
    interval.mass_before = s_.row.mass[bin - 1];
    interval.count_before = s_.row.count[bin - 1];
    interval.count -= interval.count_before;
  }
  while (interval.count > kListCapacity) refine(interval, by_mass, target, weights);
  return pick(interval, by_mass, target, weights);
}

/// Narrows `interval` to one of 256 to 512 equal parts, the one with the target in it.
template <int kBlocks>
__device__ void Row<kBlocks>::refine(Interval& interval, bool by_mass, std::uint64_t target, const Weights& weights) {
  static_assert(kBins >= 512);
  const int shift = max(0, 64 - __clzll(static_cast<long long>(interval.high - interval.low)) - 9);
  clear_histogram();
  const auto wanted = [&](std::uint32_t key, int id) {
    const std::uint64_t place = place_of(key, id);
    return place >= interval.low && place <= interval.high;
  };
  const auto bin_of = [&](std::uint32_t key, int id) {
    return static_cast<int>((interval.high - place_of(key, id)) >> shift);
  };
  for_each_weight(weights, wanted, [&](const uint4& keys, int id, const auto& masses, const auto& want) {
    add({bin_of(keys.x, id), bin_of(keys.y, id + 1), bin_of(keys.z, id + 2), bin_of(keys.w, id + 3)}, masses, want);
  });
  cumulate<true>(s_.part);
  const int bin = crossing_bin(s_.part, by_mass, target - (by_mass ? interval.mass_before : interval.count_before));
  interval.high -= static_cast<std::uint64_t>(bin) << shift;
  const std::uint64_t width = (std::uint64_t{1} << shift) - 1;
  if (interval.high - interval.low > width) interval.low = interval.high - width;
  interval.count = s_.part.count[bin];
  if (bin > 0) {
    interval.count -= s_.part.count[bin - 1];
    interval.mass_before += s_.part.mass[bin - 1];
    interval.count_before += s_.part.count[bin - 1];
  }
}

/// Puts the cluster's places in [low, high] into `merged`, in any order; their number, at most kListCapacity.
template <int kBlocks>
__device__ std::uint32_t Row<kBlocks>::gather(std::uint64_t low, std::uint64_t high) {
  const auto blocks = cluster();
  std::uint64_t* list = s_.list[list_];
  std::uint32_t* size = &s_.list_size[list_];
  list_ ^= 1;
  if (threadIdx.x == 0) *size = 0;
  __syncthreads();
  for_each(key_at(low), [&](std::uint32_t key, int id) {
    const std::uint64_t place = place_of(key, id);
    if (place >= low && place <= high) list[atomicAdd(size, 1U)] = place;
  });
  blocks.sync();
  // Warps share the lists out; each knows from all sizes where its list goes.
  static_assert(kWarps % kBlocks == 0);
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warp = threadIdx.x / 32;
  const std::uint32_t each = lane < kBlocks ? *blocks.map_shared_rank(size, lane) : 0;
  const std::uint32_t ends = warp_inclusive_sum(each);
  const std::uint32_t block = warp % kBlocks;
  const std::uint32_t count = __shfl_sync(~0U, each, block);
  std::uint64_t* to = s_.merged + __shfl_sync(~0U, ends, block) - count;
  const std::uint64_t* from = blocks.map_shared_rank(list, block);
#pragma unroll 1
  for (std::uint32_t i = lane + 32 * (warp / kBlocks); i < count; i += 32 * (kWarps / kBlocks)) {
    to[i] = from[i];
  }
  __syncthreads();
  return __shfl_sync(~0U, ends, 31);
}

template <int kBlocks>
__device__ Prefix Row<kBlocks>::pick(const Interval& interval, bool by_mass, std::uint64_t target,
                                     const Weights& weights) {
  static_assert(kListCapacity <= kThreads);
  const std::uint32_t count = gather(interval.low, interval.high);
  const std::uint32_t thread = threadIdx.x;
  if (thread < count) s_.merged_mass[thread] = weights(logit_of(key_at(s_.merged[thread])));
  __syncthreads();
  if (thread < count) {
    Prefix prefix{s_.merged[thread], interval.mass_before, interval.count_before};
#pragma unroll 2
    for (std::uint32_t i = 0; i < count; ++i) {
      if (s_.merged[i] >= prefix.place) {
        prefix.mass += s_.merged_mass[i];
        ++prefix.count;
      }
    }
    const std::uint64_t reached = by_mass ? prefix.mass : prefix.count;
    const std::uint64_t own = by_mass ? s_.merged_mass[thread] : 1;
    if (reached >= target && reached - own < target) s_.prefix = prefix;
  }
  __syncthreads();
  const Prefix found = s_.prefix;
  __syncthreads();
  return found;
}

template <int kBlocks>
__device__ void Row<kBlocks>::collect(std::uint64_t last, std::uint64_t* places) {
  const std::uint32_t count = gather(last, ~std::uint64_t{0});
  if (threadIdx.x < count) {
    const std::uint64_t own = s_.merged[threadIdx.x];
    int rank = 0;
#pragma unroll 2
    for (std::uint32_t i = 0; i < count; ++i) rank += s_.merged[i] > own ? 1 : 0;
    places[rank] = own;
  }
  __syncthreads();
}

template <int kBlocks>
__device__ std::uint64_t Row<kBlocks>::total_mass(const Weights& weights, std::uint32_t floor) {
  std::uint64_t mass = 0;
  const auto wanted = [&](std::uint32_t key, int) { return key >= floor; };
  for_each_weight(weights, wanted, [&](const uint4&, int, const auto& masses, const auto& want) {
    for (int i = 0; i < 4; ++i) mass += want[i] ? masses[i] : 0;
  });
  mass = warp_sum(mass);
  if (threadIdx.x % 32 == 0) s_.scratch[threadIdx.x / 32] = mass;
  __syncthreads();
  const auto blocks = cluster();
  if (threadIdx.x < 32) {
    mass = warp_sum(threadIdx.x < kWarps ? s_.scratch[threadIdx.x] : 0);
    if (threadIdx.x < kBlocks) {
      *blocks.map_shared_rank(&s_.exchange_mass[blocks.block_rank()], threadIdx.x) = mass;
    }
  }
  blocks.sync();
  std::uint64_t total = 0;
  for (int block = 0; block < kBlocks; ++block) total += s_.exchange_mass[block];
  return total;
}

template <int kBlocks>
__device__ void Row<kBlocks>::draw_by_id(double uniform, const Weights& weights, std::uint32_t floor,
                                         std::int32_t* token) {
  const int rank = static_cast<int>(cluster().block_rank());
  const std::uint64_t total = total_mass(weights, floor);
  std::uint64_t before = 0;
  for (int block = 0; block < rank; ++block) before += s_.exchange_mass[block];
  const std::uint64_t target = target_of_draw(uniform, total);
  if (target <= before || target > before + s_.exchange_mass[rank]) return;

  // In this block: the stretch of a warp, of which each thread takes a piece.
  int warp = 0;
  while (before + s_.scratch[warp] < target) before += s_.scratch[warp++];
  const auto mass_at = [&](int slot) { return keys_[slot] >= floor ? weights(logit_of(keys_[slot])) : 0; };
  const int end = min((warp + 1) * stretch_, num_slots_);
  const int piece = (stretch_ + kThreads - 1) / kThreads;
  const int begin = warp * stretch_ + static_cast<int>(threadIdx.x) * piece;
  std::uint64_t mass = 0;
#pragma unroll 1
  for (int slot = begin; slot < min(begin + piece, end); ++slot) mass += mass_at(slot);
  __syncthreads();  // scratch was read
  std::uint64_t reached = before + block_inclusive_sum(mass, s_.scratch);
  if (reached < target || reached - mass >= target) return;
  int slot = begin;
#pragma unroll 1
  for (reached -= mass; (reached += mass_at(slot)) < target; ++slot) {
  }
  *token = first_ + slot;
}

}  // namespace aotllm::cuda::row_search
