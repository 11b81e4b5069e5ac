#pragma once

#include <cstdint>

namespace aotllm::cuda {

inline constexpr int kCodeGroup = 32;      ///< neighbouring values of a row that share a scale
inline constexpr float kCodeMax = 448.0f;  ///< the largest code's value: a group's largest value becomes it

/// Activations as E4M3 with a float32 scale for each kCodeGroup of a row: value = code · scale. A kernel that makes a
/// part of a row can make its codes, too, as they depend on nothing else.
struct GroupCodes {
  std::uint8_t* codes = nullptr;  ///< [rows, k]; null = none
  float* scales = nullptr;        ///< [k / kCodeGroup, scale_rows]
  int scale_rows = 0;             ///< at least the rows that are made
};

}  // namespace aotllm::cuda
