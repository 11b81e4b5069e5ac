#pragma once

#include "sampling/row_search.cuh"

// Histograms of a row's tokens by key: how they are filled, summed over the cluster, and read.

namespace aotllm::cuda::row_search {

template <int kBlocks>
__device__ void Row<kBlocks>::clear_histogram() {
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) {
    s_.count[bin] = 0;
    s_.mass_low[bin] = 0;
    s_.mass_high[bin] = 0;
  }
  __syncthreads();
}

/// Takes up to 4 tokens into the histogram, side by side. A weight is added in two native 32-bit additions, since one
/// of 64 bits would be a loop; each sees its own carry.
template <int kBlocks>
__device__ void Row<kBlocks>::add(const int (&bins)[4], const std::uint64_t (&masses)[4], const bool (&wanted)[4]) {
  std::uint32_t before[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (wanted[i]) before[i] = atomicAdd(&s_.mass_low[bins[i]], static_cast<std::uint32_t>(masses[i]));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (wanted[i]) atomicAdd(&s_.count[bins[i]], 1U);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool carries = before[i] + static_cast<std::uint32_t>(masses[i]) < before[i];
    const std::uint32_t high = static_cast<std::uint32_t>(masses[i] >> 32) + (carries ? 1U : 0U);
    if (wanted[i] && high != 0) atomicAdd(&s_.mass_high[bins[i]], high);
  }
}

/// The sums of all blocks' histograms to each of them, in slices.
template <int kBlocks>
template <bool kMasses>
__device__ void Row<kBlocks>::exchange(Shared::Cumulated& to) {
  const auto blocks = cluster();
  const int thread = static_cast<int>(threadIdx.x);
  blocks.sync();
  constexpr int kSlice = kBins / kBlocks;
  constexpr int kParts = 4;  // threads that share a bin, each with every fourth block
  static_assert(kSlice * kParts <= kThreads && kSlice * kParts % 32 == 0 && kBlocks % kParts == 0);
  if (thread < kSlice * kParts) {
    const int bin = static_cast<int>(blocks.block_rank()) * kSlice + thread / kParts;
    std::uint32_t count = 0;
    std::uint64_t mass = 0;
#pragma unroll
    for (int block = thread % kParts; block < kBlocks; block += kParts) {
      const Shared& other = *blocks.map_shared_rank(&s_, block);
      count += other.count[bin];
      if constexpr (kMasses) mass += (static_cast<std::uint64_t>(other.mass_high[bin]) << 32) + other.mass_low[bin];
    }
#pragma unroll
    for (int part = 1; part < kParts; part *= 2) {
      count += __shfl_xor_sync(~0U, count, part);
      if constexpr (kMasses) mass += __shfl_xor_sync(~0U, mass, part);
    }
#pragma unroll
    for (int block = thread % kParts; block < kBlocks; block += kParts) {
      Shared::Cumulated& other = *blocks.map_shared_rank(&to, block);
      other.count[bin] = count;
      if constexpr (kMasses) other.mass[bin] = mass;
    }
  }
  blocks.sync();
}

/// Adds up the histograms of the cluster's blocks, then over the bins.
template <int kBlocks>
template <bool kMasses>
__device__ void Row<kBlocks>::cumulate(Shared::Cumulated& to) {
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (kBlocks == 1) {
    __syncthreads();
    for (int bin = thread; bin < kBins; bin += kThreads) {
      to.count[bin] = s_.count[bin];
      if constexpr (kMasses) to.mass[bin] = (static_cast<std::uint64_t>(s_.mass_high[bin]) << 32) + s_.mass_low[bin];
    }
    __syncthreads();
  } else {
    exchange<kMasses>(to);
  }
  const int bin = 2 * thread;
  const bool mine = bin < kBins;
  const std::uint32_t second = mine ? to.count[bin + 1] : 0;
  const std::uint32_t sum = block_inclusive_sum((mine ? to.count[bin] : 0) + second, s_.scratch_count);
  if (mine) {
    to.count[bin] = sum - second;
    to.count[bin + 1] = sum;
  }
  if constexpr (kMasses) {
    const std::uint64_t second_mass = mine ? to.mass[bin + 1] : 0;
    const std::uint64_t mass = block_inclusive_sum((mine ? to.mass[bin] : 0) + second_mass, s_.scratch);
    if (mine) {
      to.mass[bin] = mass - second_mass;
      to.mass[bin + 1] = mass;
    }
  }
  __syncthreads();
}

template <int kBlocks>
template <bool kMasses>
__device__ void Row<kBlocks>::histogram(const Bins& bins, const Weights& weights, std::uint32_t floor) {
  clear_histogram();
  if constexpr (kMasses) {
    const auto wanted = [&](std::uint32_t key, int) { return key >= floor; };
    for_each_weight(weights, wanted, [&](const uint4& keys, int, const auto& masses, const auto& want) {
      add({bins(keys.x), bins(keys.y), bins(keys.z), bins(keys.w)}, masses, want);
    });
  } else {
    for_each(floor, [&](std::uint32_t key, int) { atomicAdd(&s_.count[bins(key)], 1U); });
  }
  cumulate<kMasses>(s_.row);
}

template <int kBlocks>
__device__ std::uint32_t Row<kBlocks>::floor_of_top(std::uint32_t count, const Bins& bins, std::uint32_t floor) {
  clear_histogram();
  if (best_key_ >= floor) atomicAdd(&s_.count[bins(best_key_)], 1U);
  cumulate<false>(s_.row);
  if (s_.row.count[kBins - 1] < count) return floor;
  return keys_of(crossing_bin(false, count), bins, floor).x;
}

template <int kBlocks>
__device__ int Row<kBlocks>::crossing_bin(const Shared::Cumulated& in, bool by_mass, std::uint64_t target) {
  const auto sum = [&](int bin) -> std::uint64_t {
    if (bin < 0) return 0;
    return by_mass ? in.mass[bin] : in.count[bin];
  };
#pragma unroll 1
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) {
    if (sum(bin - 1) < target && target <= sum(bin)) s_.bin = bin;
  }
  __syncthreads();
  const int bin = s_.bin;
  __syncthreads();
  return bin;
}

template <int kBlocks>
__device__ uint2 Row<kBlocks>::keys_of(int bin, const Bins& bins, std::uint32_t floor) {
  const std::uint32_t highest = key_of(bins.max);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 2) {  // the first key of the bin, and that of the bin above
    const int wanted = bin - warp;
    const std::uint32_t key =
        wanted < 0 ? highest + 1 : first_key(floor, highest, [&](std::uint32_t at) { return bins(at) <= wanted; });
    if (threadIdx.x % 32 == 0) s_.bounds[warp] = key;
  }
  __syncthreads();
  const uint2 keys = {s_.bounds[0], s_.bounds[1] - 1};
  __syncthreads();
  return keys;
}

}  // namespace aotllm::cuda::row_search
