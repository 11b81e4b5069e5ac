#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "sampling/adjustment.cuh"
#include "sampling/row_split.cuh"
#include "sampling/sampling.h"
#include "sampling/team.cuh"

// A row of logits spread over the shared memory of a cluster, and searches in its order: most likely first, the lower
// id first among equals. Before SM90 there are no clusters: a single block has the row, in global memory.
namespace aotllm::cuda::row_search {

constexpr int kClusterSize = 8;  // blocks that share a row, where there are clusters
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 768;          // of a histogram; so many that two blocks with 19,000 logits each fit into an SM
constexpr int kListCapacity = 256;  // tokens that are compared with one another
constexpr int kIdBits = 19;
constexpr std::uint32_t kIdMask = (1U << kIdBits) - 1;

static_assert(kMaxSampledVocab <= 1 << kIdBits);
static_assert(kBins % kClusterSize == 0 && kBins <= 2 * kThreads);

/// Decreases from token to token in the row's order.
__device__ inline std::uint64_t place_of(std::uint32_t key, std::int32_t id) {
  return static_cast<std::uint64_t>(key) << kIdBits | (kIdMask - static_cast<std::uint32_t>(id));
}
__device__ inline std::uint32_t key_at(std::uint64_t place) {
  return static_cast<std::uint32_t>(place >> kIdBits);
}
__device__ inline std::int32_t id_at(std::uint64_t place) {
  return static_cast<std::int32_t>(kIdMask - (static_cast<std::uint32_t>(place) & kIdMask));
}

/// exp((logit - max) / temperature) in units of 2^-45, of logits that are at most `max`, to within one unit. Sums of
/// them are integers, so that their order does not matter; those of a row fit into 64 bits.
struct Weights {
  double max;
  double scale;  // log2(e) / temperature

  __device__ std::uint64_t operator()(float logit) const {
    constexpr double kRounder = 0x1.8p52;  // added, leaves an integer in the low bits
    constexpr double kUnit = 128.0;        // the last bit of kUnit + weight stands for 2^-45
    const double power = (static_cast<double>(logit) - max) * scale;
    const double rounded = power + kRounder;
    const double rest = power - (rounded - kRounder);
    // 2^rest on [-0.5, 0.5]: 1 and an interpolation in Chebyshev nodes, to within 2^-44.6.
    double value = 1.0203121063391729e-07;
    value = fma(value, rest, 1.3255224878668817e-06);
    value = fma(value, rest, 1.525268684626772e-05);
    value = fma(value, rest, 0.00015403455852453838);
    value = fma(value, rest, 0.0013333558179043112);
    value = fma(value, rest, 0.009618129159402558);
    value = fma(value, rest, 0.055504108664760424);
    value = fma(value, rest, 0.2402265069581299);
    value = fma(value, rest, 0.6931471805599453);
    value = fma(value, rest, 1.0);
    const int exponent = __double2loint(rounded) << 20;
    const double weight = __hiloint2double(__double2hiint(value) + exponent, __double2loint(value));
    const long long bits = __double_as_longlong(weight + kUnit) - __double_as_longlong(kUnit);
    return power > -60.0 ? static_cast<std::uint64_t>(bits) : 0;
  }
};

/// Bins of equal width below the largest logit; the last one takes all the rest.
struct Bins {
  float max;
  float per_logit;

  __device__ int operator()(std::uint32_t key) const {
    // Subtraction and product round monotonically, so that bins are intervals of keys.
    return min(__float2int_rz(__fmul_rn(__fsub_rn(max, logit_of(key)), per_logit)), kBins - 1);
  }
};

/// Bins from `max` down to `floor`.
__device__ inline Bins bins_between(float max, std::uint32_t floor) {
  return {max, fminf(kBins / (max - logit_of(floor)), FLT_MAX)};
}

/// Smallest key in [low, high] for which `holds`, which it does from some key on, and at `high`. For a whole warp.
template <class Predicate>
__device__ std::uint32_t first_key(std::uint32_t low, std::uint32_t high, const Predicate& holds) {
  const std::uint32_t lane = threadIdx.x % 32;
  while (low < high) {
    const std::uint64_t step = (high - low) / 32 + 1;
    const std::uint64_t probe = low + lane * step;
    const unsigned found = __ballot_sync(~0U, probe >= high || holds(static_cast<std::uint32_t>(probe)));
    const std::uint64_t first = found == 0 ? 32 : __ffs(static_cast<int>(found)) - 1;
    if (first < 32) high = static_cast<std::uint32_t>(min(low + first * step, static_cast<std::uint64_t>(high)));
    if (first > 0) low = static_cast<std::uint32_t>(low + (first - 1) * step + 1);
  }
  return high;
}

/// The same where it is known to be near `guess`.
template <class Predicate>
__device__ std::uint32_t first_key_near(std::uint32_t guess, std::uint32_t low, std::uint32_t high,
                                        const Predicate& holds) {
  guess = min(max(guess, low), high);
  const std::uint32_t begin = guess - low > 16 ? guess - 16 : low;
  const std::uint32_t probe = begin + threadIdx.x % 32;
  const unsigned found = __ballot_sync(~0U, probe >= high || holds(probe));
  if (found == 0 || ((found & 1U) != 0 && begin > low)) return first_key(low, high, holds);
  return min(begin + static_cast<std::uint32_t>(__ffs(static_cast<int>(found))) - 1, high);
}

template <class T>
__device__ T warp_inclusive_sum(T value) {
  const int lane = threadIdx.x % 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(~0U, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}
template <class T>
__device__ T warp_sum(T value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0U, value, offset);
  return value;
}
/// Sum over this thread and those before it; `scratch` [kWarps] is free again after the next barrier of the block.
template <class T>
__device__ T block_inclusive_sum(T value, T* scratch) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  value = warp_inclusive_sum(value);
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  return value + warp_sum(lane < warp ? scratch[lane] : T{0});
}

/// The token is drawn up to which the weights are at least this much: more than `uniform` (in [0, 1)) of them all.
__device__ inline std::uint64_t target_of_draw(double uniform, std::uint64_t total) {
  return min(static_cast<std::uint64_t>(uniform * static_cast<double>(total)) + 1, total);
}

/// Tokens are kept up to which the weights are at least this much: `share` (in (0, 1)) of them all.
__device__ inline std::uint64_t target_of_share(double share, std::uint64_t total) {
  const auto target = static_cast<std::uint64_t>(ceil(share * static_cast<double>(total)));
  return min(max(target, std::uint64_t{1}), total);
}

/// A token, and how many and what weight there are up to it, it included.
struct Prefix {
  std::uint64_t place = 0;
  std::uint64_t mass = 0;
  std::uint32_t count = 0;
};

/// Tokens between two places, both included, with what comes before them.
struct Interval {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  std::uint64_t mass_before = 0;
  std::uint32_t count_before = 0;
  std::uint32_t count = 0;
};

struct alignas(16) Shared {
  struct Cumulated {  // over the bins, and over the cluster
    std::uint64_t mass[kBins];
    std::uint32_t count[kBins];
  };
  Cumulated row;   // bins of logits
  Cumulated part;  // bins of an interval of places
  std::uint64_t list[2][kListCapacity];
  std::uint64_t merged[kListCapacity];
  std::uint64_t merged_mass[kListCapacity];
  std::uint64_t exchange[kClusterSize];
  std::uint64_t exchange_mass[kClusterSize];
  std::uint64_t scratch[kWarps];
  Prefix prefix;
  std::uint32_t scratch_count[kWarps];
  std::uint32_t bounds[2];
  std::uint32_t list_size[2];
  int bin;
  std::uint32_t count[kBins];  // this block's histogram
  std::uint32_t mass_low[kBins];
  std::uint32_t mass_high[kBins];
};

/// A block's slots hold keys of consecutive tokens: slot s is token first + s. The first 4 are for what the row has
/// before its units of 4 tokens (see RowSplit), the last ones for what it has behind them; 0 where there is none.
__host__ __device__ inline int slots_per_block(int vocab_size, int num_blocks) {
  return 4 * RowSplit::units_per_block(vocab_size, num_blocks) + 8;
}
inline std::size_t slot_bytes(int vocab_size, int num_blocks) {
  return static_cast<std::size_t>(slots_per_block(vocab_size, num_blocks)) * sizeof(std::uint32_t);
}

/// Shared memory of a block; a single block has its slots elsewhere.
inline std::size_t shared_bytes(int vocab_size, int num_blocks) {
  return sizeof(Shared) + (num_blocks == 1 ? 0 : slot_bytes(vocab_size, num_blocks));
}

/// One block's part in the work on a row. All methods are for all threads of all blocks of the cluster, and give the
/// same to each.
template <int kBlocks>
class Row {
 public:
  /// `slots` is for a single block: memory for those of all rows, one behind the other; `index` is the row's.
  __device__ Row(unsigned char* shared, int vocab_size, std::uint32_t* slots, int index)
      : s_(*reinterpret_cast<Shared*>(shared)),
        num_slots_(slots_per_block(vocab_size, kBlocks)),
        keys_(kBlocks == 1 ? slots + static_cast<std::size_t>(index) * static_cast<std::size_t>(num_slots_)
                           : reinterpret_cast<std::uint32_t*>(shared + sizeof(Shared))),
        stretch_((num_slots_ + 128 * kWarps - 1) / (128 * kWarps) * 128),
        vocab_size_(vocab_size) {}

  __device__ Shared& shared() { return s_; }

  /// Reads `row` into the slots.
  __device__ void read(const float* row);

  /// Applies mask and penalties to what was read.
  __device__ void adjust(const Adjustment& adjustment);

  /// The place of the most likely token, whose key is that of a finite logit where all is well.
  __device__ std::uint64_t best();

  /// Takes keys ≥ `floor` into the histogram of the row by `bins`: numbers, and weights too if wanted.
  template <bool kMasses>
  __device__ void histogram(const Bins& bins, const Weights& weights, std::uint32_t floor);

  /// A key, at least `floor`, that `count` tokens or more reach, and not many more: from the threads' best tokens,
  /// which are few to count. `floor` where they do not tell. Overwrites the histogram of the row.
  __device__ std::uint32_t floor_of_top(std::uint32_t count, const Bins& bins, std::uint32_t floor);

  /// The first token up to which there are `target` tokens, or with `by_mass` `target` weight; of the histogram's
  /// tokens, which have as many.
  __device__ Prefix find(bool by_mass, std::uint64_t target, const Bins& bins, const Weights& weights,
                         std::uint32_t floor);

  /// Lowest and highest key that a bin of the histogram can hold, of those ≥ `floor` > 0.
  __device__ uint2 keys_of(int bin, const Bins& bins, std::uint32_t floor);

  /// The bin where the tokens up to it become `target` or more.
  __device__ int crossing_bin(bool by_mass, std::uint64_t target) { return crossing_bin(s_.row, by_mass, target); }

  /// Writes the token at which the weights of keys ≥ `floor`, in order of ids, exceed `uniform` of their sum.
  __device__ void draw_by_id(double uniform, const Weights& weights, std::uint32_t floor, std::int32_t* token);

  /// Puts the places up to `last`, kListCapacity at most, into `places` of this block, in their order.
  __device__ void collect(std::uint64_t last, std::uint64_t* places);

  /// Sum of the weights of keys ≥ `floor`.
  __device__ std::uint64_t total_mass(const Weights& weights, std::uint32_t floor);

  /// Calls `visit(key, id)` for the block's tokens with keys ≥ `floor` > 0; in a thread, in order of ids.
  template <class Visit>
  __device__ void for_each(std::uint32_t floor, const Visit& visit) const {
    for_each_four([&](const uint4& keys, int id) {
      if (keys.x >= floor) visit(keys.x, id);
      if (keys.y >= floor) visit(keys.y, id + 1);
      if (keys.z >= floor) visit(keys.z, id + 2);
      if (keys.w >= floor) visit(keys.w, id + 3);
    });
  }

  /// Calls `visit(keys, id, weights, wanted)` for 4 of the block's tokens from `id` on at a time, where any of them are
  /// `wanted(key, id)`, which is false for the key 0.
  template <class Wanted, class Visit>
  __device__ void for_each_weight(const Weights& weights, const Wanted& wanted, const Visit& visit) const {
    for_each_four([&](const uint4& keys, int id) {
      const bool want[4] = {wanted(keys.x, id), wanted(keys.y, id + 1), wanted(keys.z, id + 2), wanted(keys.w, id + 3)};
      if (!__any_sync(~0U, want[0] || want[1] || want[2] || want[3])) return;
      // All four, wanted or not: they are long chains of operations, which overlap.
      const std::uint64_t masses[4] = {weights(logit_of(keys.x)), weights(logit_of(keys.y)), weights(logit_of(keys.z)),
                                       weights(logit_of(keys.w))};
      visit(keys, id, masses, want);
    });
  }

  __device__ static Team<kBlocks> cluster() { return {}; }

 private:
  /// Calls `visit(keys, id)` for 4 tokens from `id` on at a time, all lanes of a warp together: a warp goes through a
  /// stretch of slots. There are keys 0 behind its end.
  template <class Visit>
  __device__ void for_each_four(const Visit& visit) const {
    const int begin = static_cast<int>(threadIdx.x) / 32 * stretch_;
    const int end = min(begin + stretch_, num_slots_);
#pragma unroll 1
    for (int slot = begin + 4 * static_cast<int>(threadIdx.x % 32); slot - static_cast<int>(threadIdx.x % 32) * 4 < end;
         slot += 128) {
      visit(slot < end ? *reinterpret_cast<const uint4*>(keys_ + slot) : uint4{0, 0, 0, 0}, first_ + slot);
    }
  }

  __device__ void clear_histogram();
  __device__ void add(const int (&bins)[4], const std::uint64_t (&masses)[4], const bool (&wanted)[4]);
  template <bool kMasses>
  __device__ void exchange(Shared::Cumulated& to);
  template <bool kMasses>
  __device__ void cumulate(Shared::Cumulated& to);
  __device__ int crossing_bin(const Shared::Cumulated& in, bool by_mass, std::uint64_t target);
  __device__ void refine(Interval& interval, bool by_mass, std::uint64_t target, const Weights& weights);
  __device__ std::uint32_t gather(std::uint64_t low, std::uint64_t high);
  __device__ Prefix pick(const Interval& interval, bool by_mass, std::uint64_t target, const Weights& weights);

  Shared& s_;
  int num_slots_;
  std::uint32_t* keys_;
  int stretch_;  // slots of a warp
  int vocab_size_;
  int first_ = 0;
  std::uint32_t best_key_ = 0;  // of the thread's tokens, after `best`
  int list_ = 0;                // which of the two lists is next: the other blocks may still read the other one
};

}  // namespace aotllm::cuda::row_search

#include "sampling/row_histogram_impl.cuh"
#include "sampling/row_search_impl.cuh"
