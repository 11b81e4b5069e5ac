#include "tensor_map.h"

#include <cuda_runtime.h>

#include <string>

#include "aotllm/errors.h"
#include "launch.h"

namespace aotllm::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
        "cuTensorMapEncodeTiled");
  if (result != cudaDriverEntryPointSuccess || function == nullptr) {
    throw Error(ErrorKind::kEngineIncompatible,
                "the driver has no cuTensorMapEncodeTiled; target cuda needs a driver for CUDA 12.0 or later");
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMapArgs& args) {
  static const Encode encode = find_encode();
  constexpr cuuint32_t kElementStrides[] = {1, 1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult status =
      encode(&map, args.type, static_cast<cuuint32_t>(args.sizes.size()), const_cast<void*>(args.base),
             args.sizes.data(), args.strides.data(), args.box.data(), kElementStrides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             args.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return map;
  std::string sizes;
  for (const cuuint64_t size : args.sizes) sizes += (sizes.empty() ? "" : " × ") + std::to_string(size);
  throw Error(ErrorKind::kInternal, "cuTensorMapEncodeTiled refused a tensor of " + sizes + " elements: code " +
                                        std::to_string(static_cast<int>(status)));
}

CUtensorMap matrix_tensor_map(const void* data, int element_bytes, std::uint64_t rows, std::uint64_t columns,
                              int box_rows) {
  const cuuint64_t sizes[] = {columns, rows};
  const cuuint64_t strides[] = {columns * static_cast<cuuint64_t>(element_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / element_bytes), static_cast<cuuint32_t>(box_rows)};
  const CUtensorMapDataType type =
      element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return make_tensor_map({type, data, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B});
}

}  // namespace aotllm::cuda
