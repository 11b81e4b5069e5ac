#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/attention.h"

namespace aotllm::cuda::context {

/// What a kernel of context attention reads, made on the host for each call.
struct Parameters {
  CUtensorMap q;   ///< [m, heads, head_dim]; boxes of 64 rows x kChunk dims of one head
  CUtensorMap kv;  ///< [blocks, K or V, KV heads, tokens, head_dim]; boxes of box_tokens x kChunk (FP8: head_dim) dims
  const ContextTile* tiles;
  const std::int32_t* block_table;
  __nv_bfloat16* out;
  int num_items;  ///< tiles · heads
  int num_heads;
  int group;  ///< heads of one KV head
  int table_stride;
  int num_blocks;
  int block_shift;  ///< log2 of tokens_per_block
  int box_shift;    ///< log2 of box_tokens
  int window;
  float exponent_scale;  ///< exp2(exponent_scale · score) is e to the scaled (and capped) score
  float cap_scale;       ///< with a soft-cap, score = tanh(cap_scale · q·k)
};

/// Throws Error(kInternal) where `args` breaks what attention.h says of them.
void check_args(const ContextAttentionArgs& args);

/// Checks `args` and makes what the kernels read of them.
Parameters make_parameters(const ContextAttentionArgs& args);

/// Launches the kernel of a head size (64, 96, 128, 256; one translation unit each) over a grid of `blocks`.
template <int headDim>
void launch_head_dim(const Parameters& parameters, bool fp8, bool softcap, int blocks, const Stream& stream);

}  // namespace aotllm::cuda::context
