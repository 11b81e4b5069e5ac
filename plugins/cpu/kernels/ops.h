#pragma once

#include "kernels.h"

// The kernels of one ISA, as `Kernels` of kernels.h describes them.

namespace aotllm::cpu::AOTLLM_ISA {

void rms_norm(const float* x, const float* w, float eps, int n, float* y);
void quantize(const float* x, int k, ActivationBlock* blocks);
void rms_norm_quantize(const float* x, const float* w, float eps, int n, ActivationBlock* blocks);
void to_bf16(const float* x, int k, std::uint16_t* out);
void matmul(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
            std::ptrdiff_t y_stride);
void dequantize_row(const Segment& w, int row, float scale, float* out);
void rope(float* x, const float* cos, const float* sin, int half);
void store_kv(const float* k, const float* v, int head_dim, KvType type, std::uint8_t* k_block, std::uint8_t* v_block,
              int slot, int tokens_per_block);
void attention(const AttentionArgs& args);
void attention_range(const AttentionArgs& args, int range, float* partials);
void merge_attention(const AttentionArgs& args, const float* partials);
void act_mul(Activation act, const float* gate, const float* up, int n, float* out);
void add(const float* a, const float* b, int n, float* out);
void add_scaled(const float* a, float scale, const float* b, int n, float* out);
void softcap(float* x, int n, float cap);
void dot_rows(const float* a, const float* x, int n, int k, float* out);
void widen(FloatType type, const void* values, int k, float* out);
float e4m3_scale(const float* w, int k, const float* factors, int num_factors);
void e4m3_codes(const float* w, int k, float scale, std::uint8_t* codes);

/// Part of `matmul` for f32 and f16 segments.
void matmul_floats(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                   std::ptrdiff_t y_stride);
/// Part of `matmul` for bf16 segments.
void matmul_bf16(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                 std::ptrdiff_t y_stride);
/// Part of `matmul` for block formats with one scale per 32 values, or float32 scales.
void matmul_blocks(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                   std::ptrdiff_t y_stride);
/// Part of `matmul` for the K formats, with scales in two levels.
void matmul_superblocks(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                        std::ptrdiff_t y_stride);

extern const Kernels kTable;

}  // namespace aotllm::cpu::AOTLLM_ISA
