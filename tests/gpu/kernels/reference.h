#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "device_array.h"

// What tests of kernels share: random values as the device stores them, and the distance from a float64 reference.
namespace aotllm::cuda {

using Bf16 = __nv_bfloat16;

inline std::mt19937& random_engine() {
  static std::mt19937 engine(std::random_device{}());  // fresh inputs in every run
  return engine;
}

inline std::vector<float> random_normal(std::size_t size, float sigma = 1.0f) {
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> values(size);
  for (float& value : values) value = normal(random_engine());
  return values;
}

inline std::vector<Bf16> to_bf16(std::span<const float> values) {
  std::vector<Bf16> out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) out[i] = __float2bfloat16_rn(values[i]);
  return out;
}
inline std::vector<Bf16> random_bf16(std::size_t size, float sigma = 1.0f) {
  return to_bf16(random_normal(size, sigma));
}
/// E4M3 codes, rounded to nearest even.
inline std::vector<std::uint8_t> to_fp8(std::span<const float> values) {
  std::vector<std::uint8_t> out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) out[i] = __nv_cvt_float_to_fp8(values[i], __NV_SATFINITE, __NV_E4M3);
  return out;
}
inline double from_bf16(Bf16 value) {
  return __bfloat162float(value);
}
inline double from_fp8(std::uint8_t code) {
  __nv_fp8_e4m3 value;
  value.__x = code;
  return static_cast<float>(value);
}

/// ‖got − want‖ / ‖want‖; infinite where anything is not finite.
inline double relative_error(std::span<const double> got, std::span<const double> want) {
  double difference = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

/// Skips a test where no GPU is; use at its start.
#define AOTLLM_NEEDS_GPU()                                                                           \
  do {                                                                                               \
    int count_ = 0;                                                                                  \
    if (cudaGetDeviceCount(&count_) != cudaSuccess || count_ == 0) GTEST_SKIP() << "no CUDA device"; \
  } while (false)

}  // namespace aotllm::cuda
