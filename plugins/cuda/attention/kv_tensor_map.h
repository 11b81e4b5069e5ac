#pragma once

#include <cuda.h>

#include "attention/kv_layout.h"

namespace aotllm::cuda {

/// A TMA descriptor of one layer's cache: dimensions [head_dim, tokens_per_block, num_kv_heads, K or V, num_blocks],
/// innermost first; a box is `column_bytes` of a row (32, 64 or 128, which is also the swizzle) by `box_tokens` rows.
/// Throws Error(kInternal) where there is no driver or the layout does not suit it.
CUtensorMap kv_tensor_map(const KvLayerView& kv, int column_bytes, int box_tokens);

}  // namespace aotllm::cuda
