#include "kernels/math.h"
#include "kernels/ops.h"

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

static_assert(kActivationGroup == kLanes);

/// What a row's groups are measured by: its scale max|x| / (127 · kLargestFactor), factors per |x|, and codes per |x|
/// at a factor of 1. A row of nothing above 2^-100 counts as zeros, so that all of them are finite. NaN and infinity go
/// on into the scale.
struct RowScale {
  float scale = 0.0f;
  float factors = 0.0f;
  float codes = 0.0f;

  explicit RowScale(float largest) {
    constexpr auto kFactor = static_cast<float>(kLargestFactor);
    if (largest < 0x1p-100f) return;
    scale = largest / (127.0f * kFactor);
    factors = kFactor / largest;
    codes = 127.0f * kFactor / largest;
  }
};

/// round_half_even(x · inverse), kept in [-127, 127] whatever x is; -127 for a NaN.
inline I32x16 codes_of(F32x16 x, float inverse) {
  return to_i32(min(max(mul(x, set1(inverse)), set1(-127.0f)), set1(127.0f)));
}

/// Quantizes half `half` of a block. Returns factor · Σ q.
inline std::int32_t quantize_half(F32x16 x, const RowScale& row, int half, ActivationBlock& block) {
  // The factor is rounded up, but for a hundredth: a row's largest must not get one more for a rounding error.
  const std::int32_t factor = to_i32(__builtin_fmaf(largest_magnitude(x), row.factors, 0.49f));
  const auto scale = static_cast<float>(factor);
  const float inverse = factor == 0 ? 0.0f : row.codes / scale;
  std::int8_t* q = block.q + half * kLanes;
  store_i8(q, codes_of(x, inverse));
  const std::int32_t sum = sum_i8(q);
  block.scales[half] = scale;
  block.factors[half] = static_cast<std::int16_t>(factor);
  block.minus_8_sums[half] = -8 * sum;
  block.minus_128_sums[half] = -128 * sum;
  return block.factors[half] * sum;
}

/// Quantizes a row of `k` values, of which `values(i)` are [i, i + 16).
template <class Values>
void quantize_row(int k, const Values& values, ActivationBlock* blocks) {
  I32x16 top = set1_i32(0);
  for (int i = 0; i < k; i += kLanes) top = max(top, magnitude_bits(values(i)));
  const RowScale row(__builtin_bit_cast(float, reduce_max(top)));
  for (int i = 0; i < k; i += kWeightBlock) {
    ActivationBlock& block = blocks[i / kWeightBlock];
    const std::int32_t first = quantize_half(values(i), row, 0, block);
    const std::int32_t second = quantize_half(values(i + kLanes), row, 1, block);
    block.sum = static_cast<float>(first + second);
  }
  row_scale(blocks, k) = row.scale;
}

}  // namespace

void quantize(const float* x, int k, ActivationBlock* blocks) {
  quantize_row(k, [&](int i) { return load(x + i); }, blocks);
}

void rms_norm_quantize(const float* x, const float* w, float eps, int n, ActivationBlock* blocks) {
  const F32x16 factor = set1(rms_factor(x, eps, n));
  quantize_row(n, [&](int i) { return mul(mul(load(x + i), factor), load(w + i)); }, blocks);
}

}  // namespace aotllm::cpu::AOTLLM_ISA
