#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "gemm/tile_gemm.h"

// From one warp's accumulators, 16 rows of the tile, to y.
namespace aotllm::cuda::tile {

/// Scale and bias of one row of W (a column of y).
struct Column {
  float scale;
  float bias;
};

/// A warp's room in shared memory to change between the layout of accumulators and whole rows: 16 rows of up to 64
/// bf16, as 16-byte granules (8 columns) of which granule g of row r is at place g ^ (r % 8), so that neither way
/// conflicts.
class Stage {
 public:
  static constexpr int kBytes = 16 * 128;

  __device__ Stage(std::uint8_t* base, int lane) : base_(base) {
    // Lane l names row l % 8 of the 8 × 8 matrix l / 8: rows 0…7 then 8…15 of one granule, the same of the next.
    matrix_row_ = lane % 16;
    matrix_granule_ = lane / 16;
  }

  __device__ uint4& row(int row, int granule) const { return *reinterpret_cast<uint4*>(address(row, granule)); }
  __device__ void put_matrices(int granule, const std::uint32_t (&r)[4]) const {
    auto& place = *reinterpret_cast<cute::uint128_t*>(address(matrix_row_, granule + matrix_granule_));
    cute::SM90_U32x4_STSM_N::copy(r[0], r[1], r[2], r[3], place);
  }
  __device__ void get_matrices(int granule, std::uint32_t (&r)[4]) const {
    auto& place = *reinterpret_cast<cute::uint128_t*>(address(matrix_row_, granule + matrix_granule_));
    cute::SM75_U32x4_LDSM_N::copy(place, r[0], r[1], r[2], r[3]);
  }

 private:
  __device__ std::uint8_t* address(int row, int granule) const {
    return base_ + row * 128 + ((granule ^ (row % 8)) << 4);
  }

  std::uint8_t* base_;
  int matrix_row_;
  int matrix_granule_;
};

__device__ __forceinline__ std::uint32_t pack(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

__device__ __forceinline__ float2 unpack(std::uint32_t bits) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits));
}

/// act(gate) · up; both activations are x · sigmoid(t).
__device__ __forceinline__ float gated(float gate, float up, Activation activation) {
  const float t = activation == Activation::kSilu
                      ? gate
                      : 1.5957691216057308f * gate * (1.0f + 0.044715f * gate * gate);  // 2 √(2/π) (x + 0.044715 x³)
  return __fdividef(gate, 1.0f + __expf(-t)) * up;
}

/// The 16 rows × 8·kGroups columns of y that a warp turns over at a time.
template <int kGroups>
struct Chunk {
  static_assert(kGroups <= 8);
  static constexpr int kLoads =
      (kGroups + 1) / 2;  // granules of a lane; of an odd number half a warp's are past the end

  /// Granule i of a lane: neighbouring lanes have neighbouring columns.
  static __device__ int row(int i, int lane) { return (i * 32 + lane) / kGroups; }
  static __device__ int granule(int i, int lane) { return (i * 32 + lane) % kGroups; }
  static __device__ bool has(int i, int lane) { return kGroups % 2 == 0 || row(i, lane) < 16; }
};

/// Where a warp's 16 rows are in y.
struct Place {
  int row;          ///< first row
  int column;       ///< first column of y
  int rows_end;     ///< m
  int columns_end;  ///< of y
  int lane;

  __device__ bool has(int r, int granule) const { return row + r < rows_end && column + 8 * granule < columns_end; }
  __device__ std::size_t offset(int r, int granule) const {
    return static_cast<std::size_t>(row + r) * columns_end + column + 8 * granule;
  }
};

/// Residuals of the chunk that begins at `granule`.
template <int kGroups>
__device__ __forceinline__ void load_residual(const __nv_bfloat16* residual, const Place& place, int granule,
                                              uint4 (&out)[4]) {
  using C = Chunk<kGroups>;
#pragma unroll
  for (int i = 0; i < C::kLoads; ++i) {
    const int r = C::row(i, place.lane);
    const int g = granule + C::granule(i, place.lane);
    out[i] = make_uint4(0, 0, 0, 0);
    if (place.has(r, g)) out[i] = *reinterpret_cast<const uint4*>(residual + place.offset(r, g));
  }
}

/// Writes packed[2 g], packed[2 g + 1] (rows lane / 4 and lane / 4 + 8 of the chunk's group g) to y.
template <int kGroups>
__device__ __forceinline__ void store_chunk(const Stage& stage, const Place& place, int granule,
                                            const std::uint32_t (&packed)[2 * kGroups], __nv_bfloat16* y) {
  using C = Chunk<kGroups>;
#pragma unroll
  for (int g = 0; g < kGroups; g += 2) {
    const int next = g + 1 < kGroups ? g + 1 : g;  // past an odd end: written, never read
    stage.put_matrices(g, {packed[2 * g], packed[2 * g + 1], packed[2 * next], packed[2 * next + 1]});
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < C::kLoads; ++i) {
    const int r = C::row(i, place.lane);
    const int g = C::granule(i, place.lane);
    if (!C::has(i, place.lane)) continue;
    const uint4 value = stage.row(r, g);
    if (place.has(r, granule + g)) *reinterpret_cast<uint4*>(y + place.offset(r, granule + g)) = value;
  }
  __syncwarp();
}

/// v (groups of 8 columns) += the 8 · kWidth residuals that stand in `from`, from group kFirst on.
template <int kFirst, int kWidth, int kValues>
__device__ __forceinline__ void add_residual(const Stage& from, float (&v)[kValues]) {
#pragma unroll
  for (int g = 0; g < kWidth; g += 2) {
    std::uint32_t bits[4];
    from.get_matrices(g, bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 add = unpack(bits[i]);
      const int at = 4 * (kFirst + g) + 2 * i;
      v[at] += add.x;
      v[at + 1] += add.y;
    }
  }
}

/// v (kGroups groups of 8 columns) from chunk `kFirst` on, in chunks of up to 8 groups.
template <int kFirst, int kGroups>
__device__ __forceinline__ void store_plain(const TileParams& p, const Stage& stage, const Place& place,
                                            const float (&v)[4 * kGroups]) {
  if constexpr (kFirst < kGroups) {
    constexpr int kWidth = kGroups - kFirst < 8 ? kGroups - kFirst : 8;
    std::uint32_t packed[2 * kWidth];
#pragma unroll
    for (int i = 0; i < 2 * kWidth; ++i) packed[i] = pack(v[4 * kFirst + 2 * i], v[4 * kFirst + 2 * i + 1]);
    store_chunk<kWidth>(stage, place, kFirst, packed, static_cast<__nv_bfloat16*>(p.y));
    store_plain<kFirst + 8, kGroups>(p, stage, place, v);
  }
}

/// v: kGroups groups of 8 columns, of gate and up in turn; kFirst counts groups of y.
template <int kFirst, int kGroups>
__device__ __forceinline__ void store_gated(const TileParams& p, const Stage& stage, const Place& place,
                                            const float (&v)[4 * kGroups]) {
  if constexpr (kFirst < kGroups / 2) {
    constexpr int kWidth = kGroups / 2 - kFirst < 8 ? kGroups / 2 - kFirst : 8;
    std::uint32_t packed[2 * kWidth];
#pragma unroll
    for (int i = 0; i < 2 * kWidth; ++i) {
      const int gate = 8 * (kFirst + i / 2) + 2 * (i % 2);
      packed[i] = pack(gated(v[gate], v[gate + 4], p.activation), gated(v[gate + 1], v[gate + 5], p.activation));
    }
    store_chunk<kWidth>(stage, place, kFirst, packed, static_cast<__nv_bfloat16*>(p.y));
    store_gated<kFirst + 8, kGroups>(p, stage, place, v);
  }
}

template <int kGroups>
__device__ __forceinline__ void store_logits(const TileParams& p, const Place& place, const float (&v)[4 * kGroups]) {
  auto* y = static_cast<float*>(p.y);
#pragma unroll
  for (int i = 0; i < 2 * kGroups; ++i) {
    const int r = place.lane / 4 + 8 * (i % 2);
    if (!place.has(r, i / 2)) continue;
    float2 value = make_float2(v[2 * i], v[2 * i + 1]);
    if (p.softcap > 0.0f) {
      value.x = p.softcap * tanhf(value.x / p.softcap);
      value.y = p.softcap * tanhf(value.y / p.softcap);
    }
    *reinterpret_cast<float2*>(y + place.offset(r, i / 2) + 2 * (place.lane % 4)) = value;
  }
}

/// v [16, 8 kGroups] times the scales of its rows (lane / 4 and lane / 4 + 8) and columns, plus biases.
template <int kGroups>
__device__ __forceinline__ void scale(const Column* columns, const float (&row_scales)[2], int lane,
                                      float (&v)[4 * kGroups]) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const float4 c = *reinterpret_cast<const float4*>(columns + 8 * g + 2 * (lane % 4));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      v[4 * g + 2 * half] = v[4 * g + 2 * half] * row_scales[half] * c.x + c.y;
      v[4 * g + 2 * half + 1] = v[4 * g + 2 * half + 1] * row_scales[half] * c.z + c.w;
    }
  }
}

/// Writes a warp's 16 rows. `place.column` counts columns of y.
template <int kGroups>
__device__ __forceinline__ void store(const TileParams& p, const Stage& stage, const Place& place,
                                      const float (&v)[4 * kGroups]) {
  if (p.epilogue == Epilogue::kGated) {
    store_gated<0, kGroups>(p, stage, place, v);
  } else if (p.epilogue == Epilogue::kLogits) {
    store_logits<kGroups>(p, place, v);
  } else {
    store_plain<0, kGroups>(p, stage, place, v);
  }
}

}  // namespace aotllm::cuda::tile
