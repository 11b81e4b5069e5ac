#include "kernels/ops.h"
#include "kernels/simd.h"

namespace aotllm::cpu::AOTLLM_ISA {

// Per block of 16: scale = max|x| / 127, q = round_half_even(x / scale). A block of zeros has scale 0 and codes 0. A
// NaN or infinity makes the scale NaN or infinite, so that it reaches the result; codes stay in [-127, 127] always.
void quantize(const float* x, int k, std::int8_t* q, float* scales, std::int32_t* sums) {
  static_assert(kActivationBlock == kLanes);
  const I32x16 magnitude_bits = set1_i32(INT32_MAX);
  for (int block = 0; block < k / kActivationBlock; ++block) {
    const F32x16 values = load(x + block * kLanes);
    // Magnitudes order like their bit patterns, NaN above all.
    const float largest = __builtin_bit_cast(float, reduce_max(bit_and(bits(values), magnitude_bits)));
    const float scale = largest / 127.0f;
    scales[block] = scale;
    // A scale that underflows to 0 leaves nothing to divide by.
    const F32x16 scaled = scale == 0.0f ? set1(0.0f) : div(values, set1(scale));
    const I32x16 codes = to_i32(min(max(scaled, set1(-127.0f)), set1(127.0f)));  // NaN → -127
    store_i8(q + block * kLanes, codes);
    sums[block] = reduce_add(codes);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
