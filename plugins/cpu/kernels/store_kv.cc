#include "kernels/head_codes.h"
#include "kernels/math.h"
#include "kernels/ops.h"

// Tokens that share a line may be stored by several threads at once: no byte of another slot is read or written.

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

void put_f32(std::uint8_t* p, float x) {
  __builtin_memcpy(p, &x, sizeof x);
}

/// Elements of 16 or 8 bits as the layouts want them: K by pairs of d, V by pairs of slots.
template <class Element>
void put_pairs(const Element* k, const Element* v, int head_dim, std::uint8_t* k_block, std::uint8_t* v_block, int slot,
               int tokens_per_block) {
  constexpr std::ptrdiff_t kSize = sizeof(Element);
  std::uint8_t* k_at = k_block + slot * 2 * kSize;
  const std::ptrdiff_t k_line = tokens_per_block * 2 * kSize;
  for (int d = 0; d < head_dim; d += 2, k_at += k_line) __builtin_memcpy(k_at, k + d, 2 * kSize);
  std::uint8_t* v_at = v_block + (std::ptrdiff_t{slot / 2} * head_dim * 2 + slot % 2) * kSize;
  for (int d = 0; d < head_dim; ++d) __builtin_memcpy(v_at + d * 2 * kSize, v + d, kSize);
}

void store_int16(const float* k, const float* v, int head_dim, std::uint8_t* k_block, std::uint8_t* v_block, int slot,
                 int tokens_per_block) {
  const float k_scale = head_scale(k, head_dim);
  const float v_scale = largest_magnitude(v, head_dim) / kLargestValueCode16;
  alignas(64) std::int16_t k_codes[kMaxHeadDim];
  alignas(64) std::int16_t v_codes[kMaxHeadDim];
  for (int d = 0; d < head_dim; d += kLanes) {
    store_i16(k_codes + d, to_codes(load_lanes(k + d, head_dim - d), k_scale, kLargestCode16));
    store_i16(v_codes + d, to_codes(load_lanes(v + d, head_dim - d), v_scale, kLargestValueCode16));
  }
  const std::ptrdiff_t scale_at = std::ptrdiff_t{head_dim} * tokens_per_block * 2 + slot * std::ptrdiff_t{4};
  put_f32(k_block + scale_at, k_scale);
  put_f32(v_block + scale_at, v_scale);
  put_pairs(k_codes, v_codes, head_dim, k_block, v_block, slot, tokens_per_block);
}

void store_int8(const float* k, const float* v, int head_dim, std::uint8_t* k_block, std::uint8_t* v_block, int slot,
                int tokens_per_block) {
  const float k_scale = largest_magnitude(k, head_dim) / 127.0f;
  const float v_scale = largest_magnitude(v, head_dim) / 127.0f;
  std::int8_t k_codes[kMaxHeadDim];
  std::int8_t v_codes[kMaxHeadDim];
  for (int d = 0; d < head_dim; d += kLanes) {
    store_i8(k_codes + d, to_codes(load_lanes(k + d, head_dim - d), k_scale, 127.0f));
    store_i8(v_codes + d, to_codes(load_lanes(v + d, head_dim - d), v_scale, 127.0f));
  }
  const std::ptrdiff_t scale_at = std::ptrdiff_t{head_dim} * tokens_per_block + slot * std::ptrdiff_t{4};
  put_f32(k_block + scale_at, k_scale);
  put_f32(v_block + scale_at, v_scale);
  put_pairs(k_codes, v_codes, head_dim, k_block, v_block, slot, tokens_per_block);
}

void store_bf16(const float* k, const float* v, int head_dim, std::uint8_t* k_block, std::uint8_t* v_block, int slot,
                int tokens_per_block) {
  std::uint16_t k_rounded[kMaxHeadDim];
  std::uint16_t v_rounded[kMaxHeadDim];
  to_bf16(k, head_dim, k_rounded);
  to_bf16(v, head_dim, v_rounded);
  put_pairs(k_rounded, v_rounded, head_dim, k_block, v_block, slot, tokens_per_block);
}

void store_f32(const float* k, const float* v, int head_dim, std::uint8_t* k_block, std::uint8_t* v_block, int slot,
               int tokens_per_block) {
  std::uint8_t* k_at = k_block + slot * std::ptrdiff_t{4};
  const std::ptrdiff_t k_line = tokens_per_block * std::ptrdiff_t{4};
  for (int d = 0; d < head_dim; ++d) put_f32(k_at + d * k_line, k[d]);
  __builtin_memcpy(v_block + std::ptrdiff_t{slot} * head_dim * 4, v, static_cast<std::size_t>(head_dim) * 4);
}

}  // namespace

void store_kv(const float* k, const float* v, int head_dim, KvType type, std::uint8_t* k_block, std::uint8_t* v_block,
              int slot, int tokens_per_block) {
  switch (type) {
    case KvType::kF32:
      return store_f32(k, v, head_dim, k_block, v_block, slot, tokens_per_block);
    case KvType::kBF16:
      return store_bf16(k, v, head_dim, k_block, v_block, slot, tokens_per_block);
    case KvType::kI16:
      return store_int16(k, v, head_dim, k_block, v_block, slot, tokens_per_block);
    case KvType::kI8:
      return store_int8(k, v, head_dim, k_block, v_block, slot, tokens_per_block);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
