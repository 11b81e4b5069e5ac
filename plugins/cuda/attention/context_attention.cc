#include <algorithm>
#include <bit>
#include <numbers>
#include <string>

#include "aotllm/errors.h"
#include "attention/context_parameters.h"
#include "attention/context_tensor_maps.h"
#include "sm80/attention.h"

namespace aotllm::cuda {
namespace context {

void check_args(const ContextAttentionArgs& args) {
  const KvLayerView& kv = args.kv;
  const auto require = [](bool holds, const std::string& text) {
    if (!holds) throw Error(ErrorKind::kInternal, "context_attention: " + text);
  };
  require(kv.head_dim == 64 || kv.head_dim == 96 || kv.head_dim == 128 || kv.head_dim == 256,
          "head size " + std::to_string(kv.head_dim) + ", allowed are 64, 96, 128 and 256");
  require(
      kv.num_kv_heads > 0 && args.num_heads > 0 && args.num_heads % kv.num_kv_heads == 0,
      std::to_string(args.num_heads) + " heads are no multiple of " + std::to_string(kv.num_kv_heads) + " KV heads");
  require(kv.tokens_per_block >= 16 && kv.tokens_per_block <= 128 &&
              std::has_single_bit(static_cast<unsigned>(kv.tokens_per_block)),
          std::to_string(kv.tokens_per_block) + " tokens per block, allowed are 16, 32, 64 and 128");
  require(kv.num_blocks > 0 && kv.block_stride % 16 == 0,
          "a pool without blocks or of a stride that is no multiple of 16");
  require(args.scale > 0.0f && args.softcap >= 0.0f, "scale must be positive and softcap not negative");
  require(args.m > 0, "tiles without rows");
}

Parameters make_parameters(const ContextAttentionArgs& args) {
  check_args(args);
  const KvLayerView& kv = args.kv;
  const int keys = kv.head_dim > 128 ? 64 : 128;      // Config::kKeys
  const int chunk = kv.head_dim % 64 == 0 ? 64 : 32;  // Config::kChunk
  const int box_tokens = std::min(kv.tokens_per_block, keys);
  constexpr float kLog2e = std::numbers::log2e_v<float>;
  Parameters p{};
  p.q = query_map(args, 64, chunk);
  p.kv = cache_map(kv, box_tokens, kv.type == KvType::kBf16 ? chunk : kv.head_dim);
  p.tiles = args.tiles;
  p.block_table = kv.block_table;
  p.out = args.out;
  p.num_items = args.num_tiles * args.num_heads;
  p.num_heads = args.num_heads;
  p.group = args.num_heads / kv.num_kv_heads;
  p.table_stride = kv.table_stride;
  p.num_blocks = kv.num_blocks;
  p.block_shift = std::countr_zero(static_cast<unsigned>(kv.tokens_per_block));
  p.box_shift = std::countr_zero(static_cast<unsigned>(box_tokens));
  p.window = args.window;
  p.exponent_scale = kLog2e * (args.softcap > 0.0f ? args.softcap : args.scale);
  p.cap_scale = args.softcap > 0.0f ? args.scale / args.softcap : 0.0f;
  return p;
}

}  // namespace context

void context_attention(const ContextAttentionArgs& args, const Stream& stream) {
  if (args.num_tiles == 0) return;
  if (stream.sm < 90) return sm80::context_attention(args, stream);
  const context::Parameters parameters = context::make_parameters(args);
  int device = 0;
  int processors = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "number of multiprocessors");
  const int blocks = std::min(processors, parameters.num_items);
  const bool fp8 = args.kv.type == KvType::kFp8;
  const bool softcap = args.softcap > 0.0f;
  switch (args.kv.head_dim) {
    case 64:
      return context::launch_head_dim<64>(parameters, fp8, softcap, blocks, stream);
    case 96:
      return context::launch_head_dim<96>(parameters, fp8, softcap, blocks, stream);
    case 128:
      return context::launch_head_dim<128>(parameters, fp8, softcap, blocks, stream);
    default:
      return context::launch_head_dim<256>(parameters, fp8, softcap, blocks, stream);
  }
}

}  // namespace aotllm::cuda
