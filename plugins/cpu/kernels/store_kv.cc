#include "kernels/ops.h"
#include "kernels/simd.h"

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

inline std::uint16_t to_f16(float x) {
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}

inline void put_f16(std::uint8_t* p, float x) {
  const std::uint16_t half = to_f16(x);
  __builtin_memcpy(p, &half, sizeof half);
}

}  // namespace

// K is [head_dim][tokens_per_block], V is [tokens_per_block][head_dim].
void store_kv(const float* k, const float* v, int head_dim, KvType type, std::uint8_t* k_block, std::uint8_t* v_block,
              int slot, int tokens_per_block) {
  const std::ptrdiff_t size = type == KvType::kF32 ? 4 : 2;
  std::uint8_t* k_at = k_block + slot * size;
  std::uint8_t* v_at = v_block + slot * head_dim * size;
  const std::ptrdiff_t k_stride = tokens_per_block * size;
  if (type == KvType::kF32) {
    for (int d = 0; d < head_dim; ++d) __builtin_memcpy(k_at + d * k_stride, k + d, 4);
    __builtin_memcpy(v_at, v, static_cast<std::size_t>(head_dim) * 4);
  } else {
    for (int d = 0; d < head_dim; ++d) put_f16(k_at + d * k_stride, k[d]);
    for (int d = 0; d < head_dim; ++d) put_f16(v_at + d * 2, v[d]);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
