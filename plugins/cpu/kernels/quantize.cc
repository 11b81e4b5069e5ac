#include "kernels/math.h"
#include "kernels/ops.h"

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

static_assert(kActivationGroup == kLanes);

/// A group's scale, and what its values are multiplied by.
struct GroupScale {
  float scale;
  float inverse;
};

// scale = max|x| / 127. A group of nothing above 2^-100 counts as zeros, so that 127 / max|x| is finite. NaN and
// infinity go on into the scale.
inline GroupScale group_scale(F32x16 x) {
  const float largest = largest_magnitude(x);
  if (largest < 0x1p-100f) return {0.0f, 0.0f};
  return {largest / 127.0f, 127.0f / largest};
}

/// round_half_even(x · inverse), kept in [-127, 127] whatever x is; -127 for a NaN.
inline I32x16 codes_of(F32x16 x, float inverse) {
  return to_i32(min(max(mul(x, set1(inverse)), set1(-127.0f)), set1(127.0f)));
}

/// Quantizes 32 values.
inline void quantize_block(F32x16 low, F32x16 high, ActivationBlock& block) {
  const GroupScale first = group_scale(low);
  const GroupScale second = group_scale(high);
  const I32x16 q0 = codes_of(low, first.inverse);
  const I32x16 q1 = codes_of(high, second.inverse);
  store_i8(block.q, q0);
  store_i8(block.q + kLanes, q1);
  const std::int32_t sum0 = reduce_add(q0);
  const std::int32_t sum1 = reduce_add(q1);
  block.scales[0] = first.scale;
  block.scales[1] = second.scale;
  block.sum = __builtin_fmaf(second.scale, static_cast<float>(sum1), first.scale * static_cast<float>(sum0));
  block.minus_8_sums[0] = -8 * sum0;
  block.minus_8_sums[1] = -8 * sum1;
  block.minus_128_sums[0] = -128 * sum0;
  block.minus_128_sums[1] = -128 * sum1;
  block.unused = 0;
}

}  // namespace

void quantize(const float* x, int k, ActivationBlock* blocks) {
  for (int i = 0; i < k; i += kWeightBlock) quantize_block(load(x + i), load(x + i + kLanes), blocks[i / kWeightBlock]);
}

void rms_norm_quantize(const float* x, const float* w, float eps, int n, ActivationBlock* blocks) {
  const F32x16 factor = set1(rms_factor(x, eps, n));
  const auto normed = [&](int i) { return mul(mul(load(x + i), factor), load(w + i)); };
  for (int i = 0; i < n; i += kWeightBlock) quantize_block(normed(i), normed(i + kLanes), blocks[i / kWeightBlock]);
}

}  // namespace aotllm::cpu::AOTLLM_ISA
