#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "elementwise/bf16x8.cuh"
#include "elementwise/elementwise.h"

// Norm and rotation of heads, for the two kernels that do it: rope_kv and decode attention. What is summed is written
// with intrinsics, so that both round alike whatever the compiler makes of the code around it.
namespace aotllm::cuda {

/// How a head is dealt out: `pairs` pairs of chunks of values that rotate into each other (or, past the rotary
/// dimensions, that merely travel together), over 2^lanes_log2 lanes of one warp.
struct HeadLayout {
  int pairs = 0;
  int lanes_log2 = 0;
  int tokens_per_block_log2 = 0;
  float inverse_head_dim = 0.0f;
};

/// Chunks of eight values are whole in every part of a head.
inline bool rotates_in_eights(const RopeKvArgs& args) {
  return args.rotary_half % 8 == 0 && (args.head_dim / 2 - args.rotary_half) % 8 == 0;
}

inline HeadLayout head_layout(const RopeKvArgs& args, int chunk) {
  HeadLayout layout;
  layout.pairs = args.head_dim / 2 / chunk;
  const unsigned lanes = std::min(32u, std::bit_ceil(static_cast<unsigned>(layout.pairs)));
  layout.lanes_log2 = std::countr_zero(lanes);
  layout.inverse_head_dim = 1.0f / static_cast<float>(args.head_dim);
  layout.tokens_per_block_log2 = std::countr_zero(static_cast<unsigned>(args.kv.tokens_per_block));
  return layout;
}

/// Chunk values as they are in memory: they stay so, in few registers, until the angles are there.
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

/// Cosine and sine of rotary dimension i at a position, whose frequency is `frequency`.
__device__ inline float2 rotation_at(const RopeKvArgs& args, int position, float frequency) {
  float sine;
  float cosine;
  sincosf(__fmul_rn(static_cast<float>(position), frequency), &sine, &cosine);
  return {__fmul_rn(cosine, args.attention_factor), __fmul_rn(sine, args.attention_factor)};
}

/// Heads of one row of qkv: Q, then K, then V, as they stand there. kPairs is what a lane has of a head.
template <int kChunk, int kPairs>
struct RowRotation {
  const RopeKvArgs& args;
  const HeadLayout& layout;
  const float2* rotation;  ///< shared [kChunk][rotary_half / kChunk]: cosine and sine; so that lanes read neighbours
  std::int64_t row;

  struct Item {
    int head;  ///< heads() = none
    int lane;
    Packed<kChunk> packed_a[kPairs];
    Packed<kChunk> packed_b[kPairs];
    Pair<kChunk> pairs[kPairs];
  };

  __device__ static int rotation_index(const RopeKvArgs& args, int i) {
    return i % kChunk * (args.rotary_half / kChunk) + i / kChunk;
  }
  __device__ int heads() const { return args.num_heads + 2 * args.num_kv_heads; }
  __device__ bool is_q(const Item& item) const { return item.head < args.num_heads; }
  __device__ bool is_v(const Item& item) const { return item.head >= args.num_heads + args.num_kv_heads; }
  __device__ int pair_of(int lane, int i) const { return lane + (i << layout.lanes_log2); }
  __device__ bool has(const Item& item, int i) const {
    return item.head < heads() && pair_of(item.lane, i) < layout.pairs;
  }
  __device__ bool rotates(int pair) const { return pair * kChunk < args.rotary_half; }
  __device__ int first_of(int pair) const { return rotates(pair) ? pair * kChunk : pair * kChunk + args.rotary_half; }
  __device__ int second_of(int pair) const {
    return first_of(pair) + (rotates(pair) ? args.rotary_half : args.head_dim / 2 - args.rotary_half);
  }

  __device__ void load(int head, int lane, Item& item) const {
    item.head = head;
    item.lane = lane;
    const __nv_bfloat16* from = args.qkv + (row * heads() + head) * args.head_dim;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      item.packed_a[i] = item.packed_b[i] = {};
      if (!has(item, i)) continue;
      const int pair = pair_of(lane, i);
      item.packed_a[i] = load_chunk<kChunk>(from + first_of(pair));
      item.packed_b[i] = load_chunk<kChunk>(from + second_of(pair));
    }
  }

  /// What was loaded becomes values after norm and rotation. By all lanes of a warp.
  __device__ void turn(Item& item) const {
    unpack_pairs(item);
    if (args.q_norm != nullptr || args.k_norm != nullptr) normalize(item);
    rotate(item);
  }

  /// Calls use(first dimension, values) for this lane's chunks of a head.
  template <class Use>
  __device__ void for_chunks(const Item& item, Use use) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!has(item, i)) continue;
      const int pair = pair_of(item.lane, i);
      use(first_of(pair), item.pairs[i].a);
      use(second_of(pair), item.pairs[i].b);
    }
  }

 private:
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
        squares = __fmaf_rn(item.pairs[i].a[e], item.pairs[i].a[e], squares);
        squares = __fmaf_rn(item.pairs[i].b[e], item.pairs[i].b[e], squares);
      }
    }
    for (int step = 1 << layout.lanes_log2 >> 1; step > 0; step /= 2) {
      squares = __fadd_rn(squares, __shfl_xor_sync(0xFFFFFFFFu, squares, step));
    }
    const float* weight = is_q(item) ? args.q_norm : args.k_norm;
    if (is_v(item) || weight == nullptr) return;
    const float rstd = rsqrtf(__fmaf_rn(squares, layout.inverse_head_dim, args.qk_norm_eps));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!has(item, i)) continue;
      const int pair = pair_of(item.lane, i);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const float a = __fmul_rn(rstd, __ldg(weight + first_of(pair) + e));
        const float b = __fmul_rn(rstd, __ldg(weight + second_of(pair) + e));
        item.pairs[i].a[e] = __fmul_rn(item.pairs[i].a[e], a);
        item.pairs[i].b[e] = __fmul_rn(item.pairs[i].b[e], b);
      }
    }
  }

  __device__ void rotate(Item& item) const {
    if (is_v(item)) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = pair_of(item.lane, i);
      if (!rotates(pair)) continue;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const float2 turn = rotation[e * (args.rotary_half / kChunk) + pair];
        const float a = item.pairs[i].a[e];
        const float b = item.pairs[i].b[e];
        item.pairs[i].a[e] = __fmaf_rn(a, turn.x, -__fmul_rn(b, turn.y));
        item.pairs[i].b[e] = __fmaf_rn(b, turn.x, __fmul_rn(a, turn.y));
      }
    }
  }
};

/// Where the head of K or V that `item` holds lies in `block` of the cache, as bytes from kv.base: row `offset` of its
/// piece of the block.
template <class Rotation>
__device__ std::int64_t cache_offset(const Rotation& work, const typename Rotation::Item& item, const KvLayerView& kv,
                                     int block, int offset) {
  // K heads, then V heads of the block: both are pieces of tokens_per_block rows
  const std::int64_t piece = item.head - work.args.num_heads;
  const std::int64_t element = (piece * kv.tokens_per_block + offset) * kv.head_dim;
  return static_cast<std::int64_t>(block) * static_cast<std::int64_t>(kv.block_stride) +
         element * (kv.type == KvType::kFp8 ? 1 : 2);
}

}  // namespace aotllm::cuda
