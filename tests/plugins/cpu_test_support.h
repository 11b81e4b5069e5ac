#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"

namespace aotllm::cpu::test {

/// All that there are, from least to best.
inline constexpr const char* kIsas[] = {"avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"};

/// A test of one kernel on each ISA that this CPU can run.
class OnIsa : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = kernels_for(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this CPU cannot run " << GetParam();
  }
  const Kernels& ops() const { return *kernels_; }

 private:
  const Kernels* kernels_ = nullptr;
};

#define INSTANTIATE_ON_ISAS(suite)                                 \
  INSTANTIATE_TEST_SUITE_P(Isa, suite, ::testing::ValuesIn(kIsas), \
                           [](const auto& isa) { return std::string(isa.param); })

using Random = std::mt19937;

inline std::vector<float> normal(Random& random, std::size_t n, float scale = 1.0f) {
  std::normal_distribution<float> distribution(0.0f, scale);
  std::vector<float> x(n);
  for (float& v : x) v = distribution(random);
  return x;
}

/// Bytes at a 64-byte boundary, zero at first. Exactly `n` of them, so that AddressSanitizer sees a byte too many.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t n) : bytes_(new (std::align_val_t{64}) std::uint8_t[n]()), size_(n) {}
  std::uint8_t* data() { return bytes_.get(); }
  const std::uint8_t* data() const { return bytes_.get(); }
  std::size_t size() const { return size_; }

 private:
  struct Delete {
    void operator()(std::uint8_t* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::uint8_t[], Delete> bytes_;
  std::size_t size_;
};

inline std::uint32_t bits_of(float x) {
  std::uint32_t b;
  std::memcpy(&b, &x, sizeof b);
  return b;
}

inline float float_of(std::uint32_t b) {
  float x;
  std::memcpy(&x, &b, sizeof x);
  return x;
}

/// IEEE binary16 → binary32, from the definition.
inline float half_to_float(std::uint16_t h) {
  const int exponent = h >> 10 & 0x1F;
  const int mantissa = h & 0x3FF;
  float value;
  if (exponent == 31) {
    value = float_of(0x7F800000u | static_cast<std::uint32_t>(mantissa) << 13);
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    value = std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  }
  return h & 0x8000 ? -value : value;
}

/// Bit equality, any NaN equal to any other.
inline ::testing::AssertionResult same_bits(const std::vector<float>& got, const std::vector<float>& expected) {
  if (got.size() != expected.size()) return ::testing::AssertionFailure() << got.size() << " != " << expected.size();
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool both_nan = got[i] != got[i] && expected[i] != expected[i];
    if (!both_nan && bits_of(got[i]) != bits_of(expected[i])) {
      return ::testing::AssertionFailure() << "element " << i << ": got " << got[i] << ", expected " << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace aotllm::cpu::test
