#include "kernels/math.h"
#include "kernels/ops.h"

// E4M3, the finite kind: 4 bits of exponent, bias 7, 3 of mantissa, 448 at most. A float32 has its exponent in bits 23
// to 30 with a bias of 127: 2^-6, the least normal number of E4M3, has 121 there. Below that, steps are those above it.

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

constexpr float kLargest = 448.0f;
constexpr std::int32_t kExponentBits = 0x7F800000;
constexpr std::int32_t kLeastExponent = 121 << 23;
/// What sums with a value of 2^e have: their last bit is 2^(e - 3), E4M3's step there.
constexpr std::int32_t kTwentyBinades = 20 << 23;
constexpr std::int32_t kHalf = 1 << 22;

/// The bits of 2^e with e the binade of x, or that of E4M3's subnormal numbers.
inline I32x16 binade_bits(F32x16 x) {
  return max(bit_and(bits(x), set1_i32(kExponentBits)), set1_i32(kLeastExponent));
}

/// What rounding x to E4M3 adds; |x| is at most 448 and a few rounding errors.
inline F32x16 rounding_error(F32x16 x) {
  // 1.5 · 2^(e + 20): a negative x does not leave its binade.
  const F32x16 large = from_bits(add(binade_bits(x), set1_i32(kTwentyBinades + kHalf)));
  return sub(sub(add(x, large), large), x);
}

/// Σ (what rounding w[i] · inverses[j] adds)² for j in [0, Count): sixteen lane-wise sums in ascending i, then the tree
/// of `reduce_add`.
template <int Count>
void squared_errors(const float* w, int k, const float* inverses, float* sums) {
  F32x16 lanes[Count];
  for (F32x16& sum : lanes) sum = set1(0.0f);
  for (int i = 0; i < k; i += kLanes) {
    const F32x16 values = load_lanes(w + i, k - i);
    for (int j = 0; j < Count; ++j) {
      const F32x16 error = rounding_error(mul(values, set1(inverses[j])));
      lanes[j] = add(lanes[j], mul(error, error));
    }
  }
  for (int j = 0; j < Count; ++j) sums[j] = reduce_add(lanes[j]);
}

inline void e4m3_lanes(F32x16 x, float scale, std::int8_t* codes) {
  const F32x16 ratio = div(x, set1(scale));
  const F32x16 magnitude = min(from_bits(magnitude_bits(ratio)), set1(kLargest));
  const I32x16 binade = binade_bits(magnitude);
  const I32x16 large = add(binade, set1_i32(kTwentyBinades));
  // How many of its binade's steps x is: 8 to 16, fewer where it is subnormal. A binade has 8 codes.
  const I32x16 steps = sub(bits(add(magnitude, from_bits(large))), large);
  const I32x16 binades = shift_right<20>(sub(binade, set1_i32(kLeastExponent)));  // · 8
  const I32x16 sign = bit_and(shift_right<24>(bits(ratio)), set1_i32(-128));
  store_i8(codes, bit_or(add(binades, steps), sign));
}

inline F32x16 load_floats(FloatType type, const std::uint8_t* p) {
  if (type == FloatType::kF32) return from_bits(load_i32(p));
  return type == FloatType::kF16 ? load_f16(p) : from_bits(shift_left<16>(load_u16(p)));
}

}  // namespace

void widen(FloatType type, const void* values, int k, float* out) {
  const int bytes = type == FloatType::kF32 ? 4 : 2;
  const auto* p = static_cast<const std::uint8_t*>(values);
  int i = 0;
  for (; i + kLanes <= k; i += kLanes) store(out + i, load_floats(type, p + std::ptrdiff_t{i} * bytes));
  if (i == k) return;
  std::uint8_t rest[kLanes * 4] = {};
  __builtin_memcpy(rest, p + std::ptrdiff_t{i} * bytes, static_cast<std::size_t>((k - i) * bytes));
  store_lanes(out + i, load_floats(type, rest), k - i);
}

float e4m3_scale(const float* w, int k, const float* factors, int num_factors) {
  constexpr int kAtATime = 4;  // sums, constants and temporaries of more do not fit the registers of AVX2
  constexpr float kLeastNormal = 0x1p-126f;
  const float largest = largest_magnitude(w, k);
  if (largest == 0.0f) return 1.0f;
  const float quotient = largest / kLargest;
  if (!(quotient <= __FLT_MAX__)) return quotient;
  const float base = quotient < kLeastNormal ? kLeastNormal : quotient;
  if (num_factors == 1) return base * factors[0];
  float best = base;
  double least = __builtin_inf();
  for (int first = 0; first < num_factors; first += kAtATime) {
    const int count = num_factors - first < kAtATime ? num_factors - first : kAtATime;
    float scales[kAtATime];
    float inverses[kAtATime];
    float sums[kAtATime];
    for (int j = 0; j < kAtATime; ++j) {
      scales[j] = base * factors[first + (j < count ? j : 0)];
      inverses[j] = 1.0f / scales[j];
    }
    squared_errors<kAtATime>(w, k, inverses, sums);
    for (int j = 0; j < count; ++j) {
      const double scale = scales[j];
      const double error = scale * scale * sums[j];
      if (error < least) {
        least = error;
        best = scales[j];
      }
    }
  }
  return best;
}

void e4m3_codes(const float* w, int k, float scale, std::uint8_t* codes) {
  auto* out = reinterpret_cast<std::int8_t*>(codes);
  int i = 0;
  for (; i + kLanes <= k; i += kLanes) e4m3_lanes(load(w + i), scale, out + i);
  if (i == k) return;
  std::int8_t rest[kLanes];
  e4m3_lanes(load_lanes(w + i, k - i), scale, rest);
  __builtin_memcpy(out + i, rest, static_cast<std::size_t>(k - i));
}

}  // namespace aotllm::cpu::AOTLLM_ISA
