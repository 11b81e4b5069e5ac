#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/kv_layout.h"
#include "group_codes.h"
#include "launch.h"

namespace aotllm::cuda {

struct RopeKvArgs;

/// What both attentions share. A query at position p attends to positions (p − window, p], or to all up to p where
/// window is 0. Scores are scale · q·k, then softcap · tanh(s / softcap) where softcap > 0.
struct AttentionArgs {
  const __nv_bfloat16* q = nullptr;  ///< [m, num_heads · head_dim]
  __nv_bfloat16* out = nullptr;      ///< likewise
  int num_heads = 0;                 ///< a multiple of kv.num_kv_heads; head h reads KV head h / group
  float scale = 1.0f;
  float softcap = 0.0f;
  int window = 0;
  KvLayerView kv;  ///< head sizes 64, 96, 128, 256
};

/// One query of decode attention: row `row` of q and out, sequence `sequence` of the block table, `context` positions
/// (its own included).
struct DecodeQuery {
  std::int32_t row = 0;
  std::int32_t sequence = 0;
  std::int32_t context = 0;  ///< 0 = padding: nothing is read or written
};

/// Decode: one query per sequence, GQA-packed, the context split into ranges of `split_tokens` (fixed, from position 0)
/// whose partial results are combined in their order: a row's bits do not depend on the batch.
struct DecodeAttentionArgs : AttentionArgs {
  const DecodeQuery* queries = nullptr;  ///< device [num_queries]; read after the wait
  int num_queries = 0;
  int max_context = 0;   ///< upper bound of all contexts: sizes the grid, which CUDA graphs fix
  int split_tokens = 0;  ///< from decode_split_tokens
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;  ///< at least decode_workspace_bytes
  GroupCodes codes;                 ///< where the result goes in place of `out`, if there are any; SM90 only
  /// Does rope_kv's work on the way, to the same bits, where decode_can_fuse: the newest position's K and V come from
  /// fused->qkv, row `row` of each query, and are written to the cache, q (which is not read) likewise. fused->q, m,
  /// positions, sequences and kv are not read. No two queries share a row, nor the block of a newest position.
  ///
  /// Such a launch reads `queries`, block tables and older positions before its predecessor has ended. They must have
  /// been written before the first kernel of the chain of programmatic launches that this one belongs to: by what a
  /// copy, a graph's end or an ordinary launch divides from it.
  const RopeKvArgs* fused = nullptr;
};
/// Head sizes that the fused kernel can deal out: rotary and other dimensions come in whole eights.
bool decode_can_fuse(const RopeKvArgs& rope);
/// Whether it can, and is the faster way for such a launch with decode_split_tokens; results are the same.
bool decode_prefers_fused(const RopeKvArgs& rope, KvType type, int num_queries, int max_context, int tokens_per_block);
/// A choice of `split_tokens` that fills the device; a function of its arguments only.
int decode_split_tokens(int num_queries, int num_kv_heads, int max_context, int tokens_per_block);
std::size_t decode_workspace_bytes(int num_queries, int num_heads, int head_dim, int max_context, int split_tokens);
void decode_attention(const DecodeAttentionArgs& args, const Stream& stream);

/// A tile of context attention: queries [row, row + rows) of q and out at positions [position, position + rows) of
/// sequence `sequence`. Made by the host from the step, longest contexts first.
struct ContextTile {
  std::int32_t row = 0;
  std::int32_t rows = 0;  ///< 1 … kContextTileRows; 0 = padding: nothing is read or written
  std::int32_t sequence = 0;
  std::int32_t position = 0;
};
inline constexpr int kContextTileRows = 128;

/// Prefill and chunked prefill: causal attention over what the cache holds, the tile's own keys included (they were
/// written before).
struct ContextAttentionArgs : AttentionArgs {
  const ContextTile* tiles = nullptr;  ///< device [num_tiles]; read after the wait
  int num_tiles = 0;
  int m = 0;  ///< rows of q and out that exist
};
void context_attention(const ContextAttentionArgs& args, const Stream& stream);

}  // namespace aotllm::cuda
