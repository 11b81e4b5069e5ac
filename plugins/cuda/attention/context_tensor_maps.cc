#include "attention/context_tensor_maps.h"

#include <array>

#include "tensor_map.h"

namespace aotllm::cuda::context {
namespace {

/// `sizes` innermost first; `strides` in bytes, of all but the innermost.
template <std::size_t rank>
CUtensorMap encode(CUtensorMapDataType type, const void* base, const std::array<cuuint64_t, rank>& sizes,
                   const std::array<cuuint64_t, rank - 1>& strides, const std::array<cuuint32_t, rank>& box,
                   CUtensorMapSwizzle swizzle) {
  return make_tensor_map({type, base, sizes, strides, box, swizzle});
}

CUtensorMapSwizzle swizzle_of(int chunk) {
  return chunk == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
}

}  // namespace

CUtensorMap query_map(const ContextAttentionArgs& args, int rows, int chunk) {
  const auto head_dim = static_cast<cuuint64_t>(args.kv.head_dim);
  const auto heads = static_cast<cuuint64_t>(args.num_heads);
  const auto bytes = static_cast<cuuint64_t>(sizeof(__nv_bfloat16));
  return encode<3>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, args.q, {head_dim, heads, static_cast<cuuint64_t>(args.m)},
                   {head_dim * bytes, heads * head_dim * bytes},
                   {static_cast<cuuint32_t>(chunk), 1, static_cast<cuuint32_t>(rows)}, swizzle_of(chunk));
}

CUtensorMap cache_map(const KvLayerView& kv, int tokens, int chunk) {
  const bool bf16 = kv.type == KvType::kBf16;
  const auto head_dim = static_cast<cuuint64_t>(kv.head_dim);
  const auto tokens_per_block = static_cast<cuuint64_t>(kv.tokens_per_block);
  const auto heads = static_cast<cuuint64_t>(kv.num_kv_heads);
  const cuuint64_t row = head_dim * element_bytes(kv.type);
  return encode<5>(bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, kv.base,
                   {head_dim, tokens_per_block, heads, 2, static_cast<cuuint64_t>(kv.num_blocks)},
                   {row, row * tokens_per_block, row * tokens_per_block * heads, kv.block_stride},
                   {static_cast<cuuint32_t>(chunk), static_cast<cuuint32_t>(tokens), 1, 1, 1},
                   bf16 ? swizzle_of(chunk) : CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace aotllm::cuda::context
