#pragma once

#include <cuda.h>

#include "attention/attention.h"

namespace aotllm::cuda::context {

/// q as [m, heads, head_dim] in boxes of `rows` rows x `chunk` dims of one head; swizzled over the bytes of a chunk.
CUtensorMap query_map(const ContextAttentionArgs& args, int rows, int chunk);

/// The pool as [blocks, K or V, KV heads, tokens_per_block, head_dim] in boxes of `tokens` x `chunk` dims. bf16 is
/// swizzled over the bytes of a chunk, FP8 (bytes) is not. Boxes that lie outside are zeros.
CUtensorMap cache_map(const KvLayerView& kv, int tokens, int chunk);

}  // namespace aotllm::cuda::context
