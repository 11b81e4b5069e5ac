#include <cfloat>
#include <string>

#include "aotllm/errors.h"
#include "chain.cuh"
#include "comm/peer_exchange.cuh"

namespace aotllm::cuda {
namespace {

constexpr int kVectors = kMaxNormWidth / (8 * kPeerThreads);  // of a row, a thread
constexpr int kWarps = kPeerThreads / 32;
constexpr float kLargestCode = 448.0f;  // of E4M3

struct RowTotals {
  float squares;  // Σ x²
  float largest;  // max |x · weight|, by bit patterns, which order as the floats do and let a NaN win
};

__device__ inline unsigned magnitude(float value) {
  return __float_as_uint(value) & 0x7FFFFFFFu;
}

// As in rms_norm.
__device__ inline float scale_of(float largest) {
  return largest == 0.0f ? 1.0f : fmaxf(largest * (1.0f / kLargestCode), FLT_MIN);
}

// All threads get the totals, added up in one order.
__device__ inline RowTotals reduce_row(float squares, unsigned largest) {
  __shared__ float warp_squares[kWarps];
  __shared__ unsigned warp_largest[kWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  __syncthreads();  // the row before has been read
  if (threadIdx.x % 32 == 0) {
    warp_squares[threadIdx.x / 32] = squares;
    warp_largest[threadIdx.x / 32] = largest;
  }
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    squares += warp_squares[warp];
    largest = max(largest, warp_largest[warp]);
  }
  return {squares, __uint_as_float(largest)};
}

// The scale of the 128 values that 16 lanes hold; all lanes take part.
__device__ inline float block_scale(const float (&y)[8]) {
  unsigned most = 0;
#pragma unroll
  for (float value : y) most = max(most, magnitude(value));
#pragma unroll
  for (int step = 8; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
  return scale_of(__uint_as_float(most));
}

// Vector i of a row from y = (x · weight) · rstd.
__device__ inline void emit(const RmsNormArgs& norm, int row, int i, bool inside, const float (&weighted)[8],
                            float rstd, float row_scale) {
  float y[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) y[e] = weighted[e] * rstd;
  const int vectors = norm.width / 8;
  const std::int64_t begin = static_cast<std::int64_t>(row) * norm.width + i * 8;
  if (norm.y_fp8 != nullptr) {
    const float scale = norm.per_block ? block_scale(y) : row_scale;
    if (norm.per_block && inside && i % 16 == 0) {
      norm.y_scales[static_cast<std::int64_t>(row) * (vectors / 16) + i / 16] = scale;
    }
    const float inverse = __fdividef(1.0f, scale);
    float scaled[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) scaled[e] = y[e] * inverse;
    if (inside) *reinterpret_cast<uint2*>(norm.y_fp8 + begin) = pack_fp8(scaled);
  }
  if (norm.y != nullptr && inside) *reinterpret_cast<uint4*>(norm.y + begin) = pack_bf16(y);
}

// Rows are dealt out to blocks: of a decode step, one or few to each. The norm is that of the rounded sum, as it would
// be if another kernel read it.
template <int kRanks>
__global__ void __launch_bounds__(kPeerThreads)
    all_reduce_norm_kernel(const PeerView view, const AllReduceArgs args, const RmsNormArgs norm) {
  release_successor();
  wait_for_predecessor();
  const std::uint32_t call = begin_call(view);
  const std::size_t slot = call % 2 * view.capacity;
  const int vectors = args.width / 8;
  const int first = static_cast<int>(threadIdx.x);
  __nv_bfloat16* mine = view.staging[view.rank] + slot;
  for (int row = static_cast<int>(blockIdx.x); row < args.rows; row += view.blocks) {
    for (int i = first; i < vectors; i += kPeerThreads) {
      const std::int64_t v = static_cast<std::int64_t>(row) * vectors + i;
      __stcg(vector_of(mine, v), load_activation(args.partial + v * 8));
    }
  }
  exchange(view, 0, call);
  for (int row = static_cast<int>(blockIdx.x); row < args.rows; row += view.blocks) {
    float weighted[kVectors][8];
    float squares = 0.0f;
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = first + j * kPeerThreads;
#pragma unroll
      for (float& value : weighted[j]) value = 0.0f;
      if (i >= vectors) continue;
      const std::int64_t v = static_cast<std::int64_t>(row) * vectors + i;
      const uint4 sum = reduce<kRanks>(view, args, slot, v);
      *vector_of(args.out, v) = sum;
      float weights[8];
      load_weights(norm.weight + i * 8, weights);
      unpack(sum, weighted[j]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        squares += weighted[j][e] * weighted[j][e];
        weighted[j][e] *= weights[e];
        largest = max(largest, magnitude(weighted[j][e]));
      }
    }
    const RowTotals totals = reduce_row(squares, largest);
    const float rstd = rsqrtf(totals.squares * (1.0f / static_cast<float>(args.width)) + norm.eps);
    const float row_scale = scale_of(totals.largest * rstd);
    if (norm.y_fp8 != nullptr && !norm.per_block && first == 0) norm.y_scales[row] = row_scale;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = first + j * kPeerThreads;
      if (j * kPeerThreads < vectors) emit(norm, row, i, i < vectors, weighted[j], rstd, row_scale);
    }
  }
  end_call(view, call);
}

using Kernel = void (*)(PeerView, AllReduceArgs, RmsNormArgs);

Kernel choose_kernel(int size) {
  switch (size) {
    case 2:
      return all_reduce_norm_kernel<2>;
    case 3:
      return all_reduce_norm_kernel<3>;
    case 4:
      return all_reduce_norm_kernel<4>;
    case 5:
      return all_reduce_norm_kernel<5>;
    case 6:
      return all_reduce_norm_kernel<6>;
    case 7:
      return all_reduce_norm_kernel<7>;
    case 8:
      return all_reduce_norm_kernel<8>;
    default:
      throw Error(ErrorKind::kInternal, "all_reduce: " + std::to_string(size) + " ranks");
  }
}

}  // namespace

void peer_all_reduce_norm(const PeerView& view, const AllReduceArgs& args, const RmsNormArgs& norm,
                          const Stream& stream) {
  launch(choose_kernel(view.size), dim3(view.blocks), dim3(kPeerThreads), 0, stream, view, args, norm);
}

void load_peer_norm_kernels(int size) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(choose_kernel(size))), "load of a kernel");
}

}  // namespace aotllm::cuda
