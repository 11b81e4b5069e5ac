#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

namespace aotllm::cuda {

/// A tensor in device memory as the copy engine (TMA) sees it, innermost dimension first; what a box reads outside of
/// it is zero.
struct TensorMapArgs {
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const void* base = nullptr;           ///< 16-byte aligned
  std::span<const cuuint64_t> sizes;    ///< elements, 1 to 5 dimensions
  std::span<const cuuint64_t> strides;  ///< bytes, of all dimensions but the innermost; multiples of 16
  std::span<const cuuint32_t> box;      ///< elements of a copy, at most 256 in each dimension
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
};

/// The driver's function is found at run time, so that nothing links to libcuda. Throws Error(kInternal) where the
/// driver refuses, Error(kEngineIncompatible) where it is older than CUDA 12.0.
CUtensorMap make_tensor_map(const TensorMapArgs& args);

/// The map of a matrix [rows, columns] of bf16 (element_bytes 2) or bytes (1), whose rows are contiguous, for boxes of
/// `box_rows` (at most 256) × 128 bytes in the 128-byte swizzle. A row must be a multiple of 16 bytes.
CUtensorMap matrix_tensor_map(const void* data, int element_bytes, std::uint64_t rows, std::uint64_t columns,
                              int box_rows);

}  // namespace aotllm::cuda
