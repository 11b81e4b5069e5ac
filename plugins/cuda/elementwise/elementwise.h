#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/kv_layout.h"
#include "launch.h"

// Everything between the GEMMs. All pointers are on the device; rows are contiguous and 16-byte aligned.
namespace aotllm::cuda {

/// The tokens whose rows a table holds: [begin, begin + count).
struct TokenRange {
  std::int32_t begin = 0;
  std::int32_t count = INT32_MAX;
};

/// out[t] = scale · table[tokens[t] - held.begin], bf16 [m, width]; the product is rounded once. Zeros for tokens that
/// are not held. A token -1 - i below 0 stands for fed[i].
void embedding(const std::int32_t* tokens, int m, const __nv_bfloat16* table, int width, float scale,
               __nv_bfloat16* out, const Stream& stream, TokenRange held = {}, const std::int32_t* fed = nullptr);

/// y = x / sqrt(mean(x²) + eps) · weight by rows of `width`, in float32, as bf16 or as E4M3 codes with a scale.
struct RmsNormArgs {
  const __nv_bfloat16* x = nullptr;
  const std::int32_t* pick = nullptr;  ///< row i of y comes from row pick[i] of x; null = i
  const float* weight = nullptr;       ///< [width]; null = x itself, not normalized (quantization only)
  float eps = 0.0f;
  int m = 0;
  int width = 0;
  const __nv_bfloat16* residual = nullptr;  ///< y += residual, after the norm (bf16 output only)
  __nv_bfloat16* y = nullptr;               ///< [m, width], or null
  std::uint8_t* y_fp8 = nullptr;            ///< E4M3 [m, width], or null
  float* y_scales = nullptr;                ///< [m], or [m, width / 128] where per_block
  bool per_block = false;                   ///< a scale for each 128 values (kFp8Block weights) instead of each row
};
/// A scale is max|y| / 448 over what shares it (1 where that is 0); codes are rounded to nearest even.
void rms_norm(const RmsNormArgs& args, const Stream& stream);

/// After the QKV GEMM: RMSNorm of each head of Q and K where weights are given, rotate-half RoPE of the first 2 ·
/// rotary_half dimensions of Q and K, K and V to their slots of the paged cache, Q to `q`.
struct RopeKvArgs {
  const __nv_bfloat16* qkv = nullptr;  ///< [m, (num_heads + 2 num_kv_heads) · head_dim]
  __nv_bfloat16* q = nullptr;          ///< [m, num_heads · head_dim]
  int m = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  const float* q_norm = nullptr;  ///< [head_dim] or null
  const float* k_norm = nullptr;
  float qk_norm_eps = 0.0f;
  const float* inv_freq = nullptr;  ///< [rotary_half]
  int rotary_half = 0;
  float attention_factor = 1.0f;            ///< multiplies cos and sin
  const std::int32_t* positions = nullptr;  ///< [m]
  const std::int32_t* sequences = nullptr;  ///< [m], row of the block table; -1 = a padding row, which is skipped
  KvLayerView kv;
};
/// The angle is the float32 product position · inv_freq, as in the models' reference code; its cosine and sine are
/// accurate to 2 ulp of float32 for positions up to 2^20.
void rope_kv(const RopeKvArgs& args, const Stream& stream);

}  // namespace aotllm::cuda
