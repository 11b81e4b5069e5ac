#include <climits>

#include "attention/context_parameters.h"
#include "sm80/attention.h"
#include "sm80/attention_tile.cuh"

namespace aotllm::cuda::sm80 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
static_assert(16 * kWarps == kContextTileRows);

/// Keys of a tile: with Q, one tile of K and one of V take at most 99 KB, what SM86 and SM89 have.
constexpr int keys_of_tile(int head_dim) {
  return head_dim > 128 ? 32 : 64;
}
constexpr int shared_bytes(int head_dim) {
  return (kContextTileRows + 2 * keys_of_tile(head_dim)) * (head_dim * 2 + 16);
}

/// The queries of a tile to shared memory, zeros behind them.
template <int kHeadDim>
__device__ void load_queries(std::uint8_t* to, const ContextAttentionArgs& args, const ContextTile& tile, int head) {
  constexpr int kPieces = kHeadDim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kContextTileRows * kPieces; i += kThreads) {
    const int row = i / kPieces;
    const int piece = i % kPieces;
    const bool exists = row < tile.rows;
    const std::size_t at = (static_cast<std::size_t>(tile.row + row) * args.num_heads + head) * kHeadDim + piece * 8;
    copy16(to + row * kPitch<kHeadDim> + piece * 16, args.q + (exists ? at : 0), exists);
  }
}

/// Grid: (heads, tiles), 16 queries of the tile for each warp. While a tile of K is multiplied, the values of the same
/// positions arrive, and while those are, the next K. Tiles of keys begin at multiples of their size, whatever the
/// queries: a row's bits depend on its position only.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeadDim > 96 ? 1 : 2)
    context_kernel(const __grid_constant__ ContextAttentionArgs args, const Scale scale) {
  constexpr int kKeys = keys_of_tile(kHeadDim);
  extern __shared__ __align__(128) std::uint8_t shared[];
  std::uint8_t* q = shared;
  std::uint8_t* k = q + kContextTileRows * kPitch<kHeadDim>;
  std::uint8_t* v = k + kKeys * kPitch<kHeadDim>;
  const ContextTile tile = args.tiles[blockIdx.y];
  if (tile.rows == 0) return;
  const int head = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const PagedHead cache(args.kv, tile.sequence, head / (args.num_heads / args.kv.num_kv_heads));

  const int window = args.window > 0 ? args.window : INT_MAX;
  const auto first_seen = [&](int position) { return max(0, position - window + 1); };
  const Range range{first_seen(tile.position), tile.position + tile.rows};
  const int warp_row = thread / 32 * 16;
  const bool works = warp_row < tile.rows;
  const int lowest = tile.position + warp_row;  // position of the warp's first row, and of its last one
  const int highest = min(lowest + 15, range.end - 1);

  const auto load = [&](std::uint8_t* to, bool values, int first) {
    load_rows<kHeadDim, kKeys, kThreads>(to, cache, values, first, range, thread);
    cute::cp_async_fence();
  };
  WarpRows<kHeadDim, kKeys> rows;
  int first = range.begin / kKeys * kKeys;
  load_queries<kHeadDim>(q, args, tile, head);
  load(k, false, first);
  for (; first < range.end; first += kKeys) {
    cute::cp_async_wait<0>();
    __syncthreads();
    load(v, true, first);
    const bool seen = works && first <= highest && first + kKeys > first_seen(lowest);
    typename WarpRows<kHeadDim, kKeys>::Scores scores = {};
    if (seen) {
      rows.multiply(scores, q + warp_row * kPitch<kHeadDim>, k);
      const bool all = first + kKeys - 1 <= lowest && first >= first_seen(highest);
      rows.weigh(scores, scale, all, [&](int row, int key) {
        const int position = lowest + lane / 4 + 8 * row;
        return first + key <= position && first + key >= first_seen(position);
      });
    }
    cute::cp_async_wait<0>();
    __syncthreads();
    if (first + kKeys < range.end) load(k, false, first + kKeys);
    if (seen) rows.add(scores, v);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int at = warp_row + lane / 4 + 8 * row;
    const float inverse = 1.0f / rows.total(row);
    if (at >= tile.rows) continue;
    __nv_bfloat16* out =
        args.out + (static_cast<std::size_t>(tile.row + at) * args.num_heads + head) * kHeadDim + lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; ++d) {
      *reinterpret_cast<std::uint32_t*>(out + 8 * d) =
          pack_bf16x2(rows.values[d][2 * row] * inverse, rows.values[d][2 * row + 1] * inverse);
    }
  }
}

template <int kHeadDim>
void launch_head_dim(const ContextAttentionArgs& args, const Stream& stream) {
  constexpr int kBytes = shared_bytes(kHeadDim);
  check(cudaFuncSetAttribute(context_kernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "shared memory of context attention");
  launch(context_kernel<kHeadDim>, dim3(static_cast<unsigned>(args.num_heads), static_cast<unsigned>(args.num_tiles)),
         dim3(kThreads), kBytes, stream, args, Scale(args.scale, args.softcap));
}

}  // namespace

void context_attention(const ContextAttentionArgs& args, const Stream& stream) {
  if (args.num_tiles == 0) return;
  context::check_args(args);
  check_bf16(args.kv);
  switch (args.kv.head_dim) {
    case 64:
      return launch_head_dim<64>(args, stream);
    case 96:
      return launch_head_dim<96>(args, stream);
    case 128:
      return launch_head_dim<128>(args, stream);
    default:
      return launch_head_dim<256>(args, stream);
  }
}

}  // namespace aotllm::cuda::sm80
