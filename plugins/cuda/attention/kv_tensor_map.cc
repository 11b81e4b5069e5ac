#include "attention/kv_tensor_map.h"

#include "tensor_map.h"

namespace aotllm::cuda {

CUtensorMap kv_tensor_map(const KvLayerView& kv, int column_bytes, int box_tokens) {
  const auto element = static_cast<cuuint64_t>(element_bytes(kv.type));
  const auto dim = static_cast<cuuint64_t>(kv.head_dim);
  const auto tokens = static_cast<cuuint64_t>(kv.tokens_per_block);
  const auto heads = static_cast<cuuint64_t>(kv.num_kv_heads);
  const cuuint64_t sizes[5] = {dim, tokens, heads, 2, static_cast<cuuint64_t>(kv.num_blocks)};
  const cuuint64_t strides[4] = {dim * element, tokens * dim * element, heads * tokens * dim * element,
                                 static_cast<cuuint64_t>(kv.block_stride)};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(column_bytes) / static_cast<cuuint32_t>(element),
                             static_cast<cuuint32_t>(box_tokens), 1, 1, 1};
  const CUtensorMapSwizzle swizzle = column_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : column_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                          : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUtensorMapDataType type =
      kv.type == KvType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return make_tensor_map({type, kv.base, sizes, strides, box, swizzle});
}

}  // namespace aotllm::cuda
