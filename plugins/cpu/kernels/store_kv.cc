#include "kernels/math.h"
#include "kernels/ops.h"

// Tokens that share a line may be stored by several threads at once: no byte of another slot is read or written.

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

void put_f32(std::uint8_t* p, float x) {
  __builtin_memcpy(p, &x, sizeof x);
}

void put_f16(std::uint8_t* p, float x) {
  const std::uint16_t half = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(p, &half, sizeof half);
}

/// Codes of one token's K or V; returns their scale.
float quantize_head(const float* x, int head_dim, std::int8_t* codes) {
  const float scale = largest_magnitude(x, head_dim) / 127.0f;
  for (int d = 0; d < head_dim; d += kLanes) {
    store_i8(codes + d, to_codes(load_lanes(x + d, head_dim - d), scale, 127.0f));
  }
  return scale;
}

void store_int8(const float* k, const float* v, int head_dim, std::uint8_t* k_block, std::uint8_t* v_block, int slot,
                int tokens_per_block) {
  const std::ptrdiff_t scale_at = std::ptrdiff_t{head_dim} * tokens_per_block + slot * std::ptrdiff_t{sizeof(float)};
  std::int8_t codes[kMaxHeadDim];
  put_f32(k_block + scale_at, quantize_head(k, head_dim, codes));
  for (int d = 0; d < head_dim; d += 2) {
    __builtin_memcpy(k_block + (std::ptrdiff_t{d} * tokens_per_block + slot * 2), codes + d, 2);
  }
  put_f32(v_block + scale_at, quantize_head(v, head_dim, codes));
  std::uint8_t* v_at = v_block + slot / 2 * head_dim * 2 + slot % 2;
  for (int d = 0; d < head_dim; ++d) v_at[d * 2] = static_cast<std::uint8_t>(codes[d]);
}

}  // namespace

void store_kv(const float* k, const float* v, int head_dim, KvType type, std::uint8_t* k_block, std::uint8_t* v_block,
              int slot, int tokens_per_block) {
  if (type == KvType::kI8) return store_int8(k, v, head_dim, k_block, v_block, slot, tokens_per_block);
  const std::ptrdiff_t size = type == KvType::kF32 ? 4 : 2;
  std::uint8_t* k_at = k_block + slot * size;
  std::uint8_t* v_at = v_block + slot * head_dim * size;
  const std::ptrdiff_t k_stride = tokens_per_block * size;
  if (type == KvType::kF32) {
    for (int d = 0; d < head_dim; ++d) put_f32(k_at + d * k_stride, k[d]);
    __builtin_memcpy(v_at, v, static_cast<std::size_t>(head_dim) * 4);
  } else {
    for (int d = 0; d < head_dim; ++d) put_f16(k_at + d * k_stride, k[d]);
    for (int d = 0; d < head_dim; ++d) put_f16(v_at + d * 2, v[d]);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
