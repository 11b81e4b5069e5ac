#include "kernels/math.h"
#include "kernels/ops.h"

namespace aotllm::cpu::AOTLLM_ISA {

// Per block of 16: scale = max|x| / 127, q = round_half_even(x / scale). A block of zeros has scale 0 and codes 0. A
// NaN or infinity makes the scale NaN or infinite, so that it reaches the result; codes stay in [-127, 127] always.
void quantize(const float* x, int k, std::int8_t* q, float* scales, std::int32_t* sums) {
  static_assert(kActivationBlock == kLanes);
  for (int block = 0; block < k / kActivationBlock; ++block) {
    const F32x16 values = load(x + block * kLanes);
    const float scale = largest_magnitude(values) / 127.0f;
    scales[block] = scale;
    const I32x16 codes = to_codes(values, scale, 127.0f);
    store_i8(q + block * kLanes, codes);
    sums[block] = reduce_add(codes);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
