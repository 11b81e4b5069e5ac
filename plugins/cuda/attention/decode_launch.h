#pragma once

#include "attention/attention.h"

// Inside of decode attention: what its translation units and its benchmark share.
namespace aotllm::cuda {

struct DecodeParams;

/// Throws Error(kInternal) where `args` breaks what attention.h says of them.
void check_decode_args(const DecodeAttentionArgs& args);

/// Where the ranges of split contexts leave their results, in the workspace of `args`.
struct DecodeRangeResults {
  float2* sums = nullptr;   ///< [queries, heads, ranges]: maximum (log2) and sum of each range
  float* values = nullptr;  ///< [queries, heads, ranges, head_dim]: weighted sums of V, relative to that maximum
};
DecodeRangeResults decode_range_results(const DecodeAttentionArgs& args);

/// Choices that change speed only, never bits; 0 = the kernel's own choice.
struct DecodeTuning {
  int box_tokens = 0;        ///< positions of one TMA box: 16, 32 or 64, at most tokens_per_block
  int stages = 0;            ///< upper bound
  int blocks_per_sm = 0;     ///< upper bound
  bool no_clusters = false;  ///< ranges meet in the workspace
};

void decode_attention(const DecodeAttentionArgs& args, const DecodeTuning& tuning, const Stream& stream);

void launch_decode_bf16(const DecodeAttentionArgs& args, const DecodeTuning& tuning, const DecodeParams& params,
                        const Stream& stream);
void launch_decode_fp8(const DecodeAttentionArgs& args, const DecodeTuning& tuning, const DecodeParams& params,
                       const Stream& stream);

}  // namespace aotllm::cuda
