#include "kernels/ops.h"
#include "kernels/simd.h"

namespace aotllm::cpu::AOTLLM_ISA {

// Rounds to nearest even; a NaN stays one. Integers alone, so that no mode matters. Zeros follow up to a whole line.
void to_bf16(const float* x, int k, std::uint16_t* out) {
  const I32x16 infinity = set1_i32(0x7F800000);
  for (int i = 0; i < (k + kBf16Line - 1) / kBf16Line * kBf16Line; i += kLanes) {
    const I32x16 word = bits(load_lanes(x + i, k > i ? k - i : 0));
    const I32x16 magnitude = bit_and(word, set1_i32(INT32_MAX));
    const I32x16 above = sub(magnitude, infinity);  // > 0 for a NaN
    const I32x16 finite = sub(magnitude, max(above, set1_i32(0)));
    const I32x16 last_bit = bit_and(shift_right<16>(finite), set1_i32(1));
    const I32x16 rounded = shift_right<16>(add(finite, add(last_bit, set1_i32(0x7FFF))));
    const I32x16 quiet = bit_and(shift_right<31>(sub(set1_i32(0), above)), set1_i32(0x40));
    const I32x16 sign = bit_and(shift_right<16>(word), set1_i32(0x8000));
    store_u16(out + i, bit_or(sign, bit_or(rounded, quiet)));
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
