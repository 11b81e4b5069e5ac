#include <algorithm>
#include <bit>
#include <string>
#include <type_traits>

#include "aotllm/errors.h"
#include "elementwise/bf16x8.cuh"
#include "elementwise/elementwise.h"

namespace aotllm::cuda {
namespace {

// Small blocks: a row's heads spread over several multiprocessors, and blocks of different rows get out of step, some
// loading while others store. 12 of them fill a multiprocessor's registers.
constexpr int kMaxThreads = 128;
constexpr int kResidentBlocks = 12;

// How a head is dealt out: `pairs` pairs of kChunk values that rotate into each other (or, past the rotary dimensions,
// that merely travel together), over 2^lanes_log2 lanes of one warp.
struct HeadLayout {
  int pairs = 0;
  int lanes_log2 = 0;
  int items = 0;  // lanes of all heads of a row, rounded up to whole warps
  int tokens_per_block_log2 = 0;
  float inverse_head_dim = 0.0f;
};

// kChunk values as they are in memory: they stay so, in few registers, until the angles are there.
template <int kChunk>
using Packed = std::conditional_t<kChunk == 8, uint4, std::uint32_t>;

template <int kChunk>
struct Pair {
  float a[kChunk];
  float b[kChunk];
};

template <int kChunk>
__device__ Packed<kChunk> load_chunk(const __nv_bfloat16* from) {
  if constexpr (kChunk == 8) {
    return load_activation(from);
  } else {
    return __ldcg(reinterpret_cast<const unsigned short*>(from));
  }
}

template <int kChunk>
__device__ void unpack_chunk(const Packed<kChunk>& packed, float (&values)[kChunk]) {
  if constexpr (kChunk == 8) {
    unpack(packed, values);
  } else {
    values[0] = unpack_bf16x2(packed).x;
  }
}

template <int kChunk>
__device__ void store_bf16(__nv_bfloat16* to, const float (&values)[kChunk]) {
  if constexpr (kChunk == 8) {
    *reinterpret_cast<uint4*>(to) = pack_bf16(values);
  } else {
    *to = __float2bfloat16_rn(values[0]);
  }
}

template <int kChunk>
__device__ void store_fp8(std::uint8_t* to, const float (&values)[kChunk]) {
  if constexpr (kChunk == 8) {
    *reinterpret_cast<uint2*>(to) = pack_fp8(values);
  } else {
    *to = __nv_cvt_float_to_fp8(values[0], __NV_SATFINITE, __NV_E4M3);
  }
}

// One row's heads: Q, then K, then V, as they stand in qkv. kPairs is what a lane has of a head.
template <int kChunk, int kPairs>
struct RowRotation {
  const RopeKvArgs& args;
  const HeadLayout& layout;
  const float2* rotation;  // shared [kChunk][rotary_half / kChunk]: cosine and sine; so that lanes read neighbours
  std::int64_t row;
  std::int64_t slot = 0;  // in the cache, bytes of its block's start
  int offset = 0;         // row within a head's piece of the block

  struct Item {
    int head;
    int lane;
    Packed<kChunk> packed_a[kPairs];
    Packed<kChunk> packed_b[kPairs];
    Pair<kChunk> pairs[kPairs];
  };

  __device__ int heads() const { return args.num_heads + 2 * args.num_kv_heads; }
  __device__ int pair_of(int lane, int i) const { return lane + (i << layout.lanes_log2); }
  __device__ bool has(const Item& item, int i) const {
    return item.head < heads() && pair_of(item.lane, i) < layout.pairs;
  }
  __device__ bool rotates(int pair) const { return pair * kChunk < args.rotary_half; }
  __device__ int first_of(int pair) const { return rotates(pair) ? pair * kChunk : pair * kChunk + args.rotary_half; }
  __device__ int second_of(int pair) const {
    return first_of(pair) + (rotates(pair) ? args.rotary_half : args.head_dim / 2 - args.rotary_half);
  }

  __device__ void load(int index, Item& item) const {
    item.head = index >> layout.lanes_log2;
    item.lane = index & ((1 << layout.lanes_log2) - 1);
    const __nv_bfloat16* from = args.qkv + (row * heads() + item.head) * args.head_dim;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      item.packed_a[i] = item.packed_b[i] = {};
      if (!has(item, i)) continue;
      const int pair = pair_of(item.lane, i);
      item.packed_a[i] = load_chunk<kChunk>(from + first_of(pair));
      item.packed_b[i] = load_chunk<kChunk>(from + second_of(pair));
    }
  }

  __device__ void unpack_pairs(Item& item) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      unpack_chunk<kChunk>(item.packed_a[i], item.pairs[i].a);
      unpack_chunk<kChunk>(item.packed_b[i], item.pairs[i].b);
    }
  }

  // All lanes of a warp take part: the sum runs over the lanes of a head.
  __device__ void normalize(Item& item) const {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        squares += item.pairs[i].a[e] * item.pairs[i].a[e] + item.pairs[i].b[e] * item.pairs[i].b[e];
      }
    }
    for (int step = 1 << layout.lanes_log2 >> 1; step > 0; step /= 2) {
      squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
    }
    const bool is_q = item.head < args.num_heads;
    const bool is_v = item.head >= args.num_heads + args.num_kv_heads;
    const float* weight = is_q ? args.q_norm : args.k_norm;
    if (is_v || weight == nullptr) return;
    const float rstd = rsqrtf(squares * layout.inverse_head_dim + args.qk_norm_eps);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!has(item, i)) continue;
      const int pair = pair_of(item.lane, i);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        item.pairs[i].a[e] *= rstd * __ldg(weight + first_of(pair) + e);
        item.pairs[i].b[e] *= rstd * __ldg(weight + second_of(pair) + e);
      }
    }
  }

  __device__ void rotate(Item& item) const {
    if (item.head >= args.num_heads + args.num_kv_heads) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = pair_of(item.lane, i);
      if (!rotates(pair)) continue;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const float2 turn = rotation[e * (args.rotary_half / kChunk) + pair];
        const float a = item.pairs[i].a[e];
        const float b = item.pairs[i].b[e];
        item.pairs[i].a[e] = a * turn.x - b * turn.y;
        item.pairs[i].b[e] = b * turn.x + a * turn.y;
      }
    }
  }

  __device__ void store(const Item& item) const {
    const bool is_q = item.head < args.num_heads;
    const std::int64_t q_begin = (row * args.num_heads + item.head) * args.head_dim;
    // K heads, then V heads of the block: both are pieces of tokens_per_block rows
    const std::int64_t piece = item.head - args.num_heads;
    const std::int64_t kv_begin = (piece * args.kv.tokens_per_block + offset) * args.head_dim;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!has(item, i)) continue;
      const int pair = pair_of(item.lane, i);
      const int first = first_of(pair);
      const int second = second_of(pair);
      if (!is_q && args.kv.type == KvType::kFp8) {
        std::uint8_t* to = args.kv.base + slot + kv_begin;
        store_fp8<kChunk>(to + first, item.pairs[i].a);
        store_fp8<kChunk>(to + second, item.pairs[i].b);
      } else {
        __nv_bfloat16* to = is_q ? args.q + q_begin : reinterpret_cast<__nv_bfloat16*>(args.kv.base + slot) + kv_begin;
        store_bf16<kChunk>(to + first, item.pairs[i].a);
        store_bf16<kChunk>(to + second, item.pairs[i].b);
      }
    }
  }
};

// Grid: (rows, groups of heads). A block's angles are computed once, while its values are on their way, and shared by
// its heads.
template <int kChunk, int kPairs>
__global__ void __launch_bounds__(kMaxThreads, kChunk == 8 ? kResidentBlocks : 1)
    rope_kv_kernel(const RopeKvArgs args, const HeadLayout layout) {
  extern __shared__ float2 rotation[];
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  cudaTriggerProgrammaticLaunchCompletion();
  const float frequency = thread < args.rotary_half ? __ldg(args.inv_freq + thread) : 0.0f;
  cudaGridDependencySynchronize();

  using Rotation = RowRotation<kChunk, kPairs>;
  Rotation work{args, layout, rotation, static_cast<std::int64_t>(blockIdx.x)};
  const int sequence = __ldcg(args.sequences + blockIdx.x);
  const int position = __ldcg(args.positions + blockIdx.x);
  typename Rotation::Item item;
  work.load(static_cast<int>(blockIdx.y) * threads + thread, item);
  if (sequence < 0) return;
  const int entry = position >> layout.tokens_per_block_log2;
  const int block = __ldcg(args.kv.block_table + static_cast<std::int64_t>(sequence) * args.kv.table_stride + entry);
  for (int i = thread; i < args.rotary_half; i += threads) {
    const float angle = __fmul_rn(static_cast<float>(position), i == thread ? frequency : __ldg(args.inv_freq + i));
    float sine;
    float cosine;
    sincosf(angle, &sine, &cosine);
    rotation[i % kChunk * (args.rotary_half / kChunk) + i / kChunk] = {cosine * args.attention_factor,
                                                                       sine * args.attention_factor};
  }
  work.slot = static_cast<std::int64_t>(block) * static_cast<std::int64_t>(args.kv.block_stride);
  work.offset = position - (entry << layout.tokens_per_block_log2);
  __syncthreads();
  work.unpack_pairs(item);
  if (args.q_norm != nullptr || args.k_norm != nullptr) work.normalize(item);
  work.rotate(item);
  work.store(item);
}

HeadLayout head_layout(const RopeKvArgs& args, int chunk) {
  HeadLayout layout;
  layout.pairs = args.head_dim / 2 / chunk;
  const unsigned lanes = std::min(32u, std::bit_ceil(static_cast<unsigned>(layout.pairs)));
  layout.lanes_log2 = std::countr_zero(lanes);
  const int heads = args.num_heads + 2 * args.num_kv_heads;
  layout.inverse_head_dim = 1.0f / static_cast<float>(args.head_dim);
  layout.tokens_per_block_log2 = std::countr_zero(static_cast<unsigned>(args.kv.tokens_per_block));
  layout.items = ((heads << layout.lanes_log2) + 31) / 32 * 32;
  return layout;
}

void check_args(const RopeKvArgs& args) {
  const auto fail = [](const std::string& text) { throw Error(ErrorKind::kInternal, "rope_kv: " + text); };
  if (args.head_dim <= 0 || args.head_dim % 2 != 0 || args.head_dim > 512) {
    fail("head size " + std::to_string(args.head_dim) + "; it must be even and at most 512");
  }
  if (args.rotary_half < 0 || 2 * args.rotary_half > args.head_dim) {
    fail("rotary half " + std::to_string(args.rotary_half) + " of a head of " + std::to_string(args.head_dim));
  }
  if (args.kv.head_dim != args.head_dim || args.kv.num_kv_heads != args.num_kv_heads) {
    fail("the cache has " + std::to_string(args.kv.num_kv_heads) + " heads of " + std::to_string(args.kv.head_dim) +
         ", K has " + std::to_string(args.num_kv_heads) + " of " + std::to_string(args.head_dim));
  }
  if (!std::has_single_bit(static_cast<unsigned>(args.kv.tokens_per_block))) {
    fail("tokens per block " + std::to_string(args.kv.tokens_per_block) + "; it must be a power of two");
  }
}

}  // namespace

void rope_kv(const RopeKvArgs& args, const Stream& stream) {
  check_args(args);
  if (args.m <= 0) return;
  const bool wide = args.rotary_half % 8 == 0 && (args.head_dim / 2 - args.rotary_half) % 8 == 0;
  const HeadLayout layout = head_layout(args, wide ? 8 : 1);
  // Equal shares of the lanes for every block
  const int blocks = (layout.items + kMaxThreads - 1) / kMaxThreads;
  const int threads = ((layout.items + blocks - 1) / blocks + 31) / 32 * 32;
  const std::size_t shared = static_cast<std::size_t>(args.rotary_half) * sizeof(float2);
  const dim3 grid(static_cast<unsigned>(args.m), static_cast<unsigned>(blocks));
  const dim3 block(static_cast<unsigned>(threads));
  if (wide) {
    launch(rope_kv_kernel<8, 1>, grid, block, shared, stream, args, layout);
  } else {
    launch(rope_kv_kernel<1, 8>, grid, block, shared, stream, args, layout);
  }
}

}  // namespace aotllm::cuda
