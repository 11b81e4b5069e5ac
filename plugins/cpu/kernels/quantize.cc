#include "kernels/ops.h"
#include "kernels/simd.h"

namespace aotllm::cpu::AOTLLM_ISA {

// Per block of 32: scale = max|x| / 127, q = round_half_even(x / scale). A block of zeros has scale 0 and codes 0. A
// NaN or infinity makes the scale NaN or infinite, so that it reaches the result; codes stay in [-127, 127] always.
void quantize(const float* x, int k, std::int8_t* q, float* scales, std::int32_t* sums) {
  const I32x16 magnitude_bits = set1_i32(INT32_MAX);
  for (int i = 0; i < k; i += kActivationBlock) {
    const F32x16 x0 = load(x + i);
    const F32x16 x1 = load(x + i + kLanes);
    // Magnitudes order like their bit patterns, NaN above all.
    const I32x16 top = max(bit_and(bits(x0), magnitude_bits), bit_and(bits(x1), magnitude_bits));
    const float largest = __builtin_bit_cast(float, reduce_max(top));
    const float scale = largest / 127.0f;
    scales[i / kActivationBlock] = scale;
    // A scale that underflows to 0 leaves nothing to divide by.
    const bool empty = scale == 0.0f;
    const F32x16 divisor = set1(empty ? 1.0f : scale);
    for (int half = 0; half < 2; ++half) {
      const F32x16 scaled = empty ? set1(0.0f) : div(half ? x1 : x0, divisor);
      const F32x16 clamped = min(max(scaled, set1(-127.0f)), set1(127.0f));  // NaN → -127
      const I32x16 codes = to_i32(clamped);
      store_i8(q + i + half * kLanes, codes);
      sums[i / kLanes + half] = reduce_add(codes);
    }
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
