#pragma once

#include "attention/attention.h"

// Attention with what SM80 has, so for every later GPU: mma.sync, cp.async; caches of bf16. Arguments and results are
// those of attention/attention.h, which comes here for streams of GPUs before SM90; DecodeAttentionArgs::fused is not
// taken.
namespace aotllm::cuda::sm80 {

void context_attention(const ContextAttentionArgs& args, const Stream& stream);
void decode_attention(const DecodeAttentionArgs& args, const Stream& stream);

}  // namespace aotllm::cuda::sm80
