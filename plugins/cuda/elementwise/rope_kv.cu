#include <algorithm>
#include <bit>
#include <string>

#include "aotllm/errors.h"
#include "chain.cuh"
#include "elementwise/elementwise.h"
#include "elementwise/rope_rotation.cuh"

namespace aotllm::cuda {
namespace {

// Small blocks: a row's heads spread over several multiprocessors, and blocks of different rows get out of step, some
// loading while others store. 12 of them fill a multiprocessor's registers.
constexpr int kMaxThreads = 128;
constexpr int kResidentBlocks = 12;

// Q of a row to `q`, K and V to the cache.
template <int kChunk, int kPairs>
__device__ void store(const RowRotation<kChunk, kPairs>& work, const typename RowRotation<kChunk, kPairs>::Item& item,
                      int block, int offset) {
  const RopeKvArgs& args = work.args;
  __nv_bfloat16* q = args.q + (work.row * args.num_heads + item.head) * args.head_dim;
  std::uint8_t* kv = args.kv.base + cache_offset(work, item, args.kv, block, offset);
  work.for_chunks(item, [&](int dim, const float (&values)[kChunk]) {
    if (work.is_q(item)) {
      store_bf16<kChunk>(q + dim, values);
    } else if (args.kv.type == KvType::kFp8) {
      store_fp8<kChunk>(kv + dim, values);
    } else {
      store_bf16<kChunk>(reinterpret_cast<__nv_bfloat16*>(kv) + dim, values);
    }
  });
}

// Grid: (rows, groups of heads). A block's angles are computed once, while its values are on their way, and shared by
// its heads.
template <int kChunk, int kPairs>
__global__ void __launch_bounds__(kMaxThreads, kChunk == 8 ? kResidentBlocks : 1)
    rope_kv_kernel(const RopeKvArgs args, const HeadLayout layout) {
  extern __shared__ float2 rotation[];
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  release_successor();
  const float frequency = thread < args.rotary_half ? __ldg(args.inv_freq + thread) : 0.0f;
  wait_for_predecessor();

  using Rotation = RowRotation<kChunk, kPairs>;
  const Rotation work{args, layout, rotation, static_cast<std::int64_t>(blockIdx.x)};
  const int sequence = __ldcg(args.sequences + blockIdx.x);
  const int position = __ldcg(args.positions + blockIdx.x);
  const int index = static_cast<int>(blockIdx.y) * threads + thread;
  typename Rotation::Item item;
  work.load(index >> layout.lanes_log2, index & ((1 << layout.lanes_log2) - 1), item);
  if (sequence < 0) return;
  const int entry = position >> layout.tokens_per_block_log2;
  const int block = __ldcg(args.kv.block_table + static_cast<std::int64_t>(sequence) * args.kv.table_stride + entry);
  for (int i = thread; i < args.rotary_half; i += threads) {
    rotation[Rotation::rotation_index(args, i)] =
        rotation_at(args, position, i == thread ? frequency : __ldg(args.inv_freq + i));
  }
  __syncthreads();
  work.turn(item);
  store(work, item, block, position - (entry << layout.tokens_per_block_log2));
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
  const bool wide = rotates_in_eights(args);
  const HeadLayout layout = head_layout(args, wide ? 8 : 1);
  // Lanes of all heads of a row, in equal shares of whole warps for every block
  const int lanes = (((args.num_heads + 2 * args.num_kv_heads) << layout.lanes_log2) + 31) / 32 * 32;
  const int blocks = (lanes + kMaxThreads - 1) / kMaxThreads;
  const int threads = ((lanes + blocks - 1) / blocks + 31) / 32 * 32;
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
