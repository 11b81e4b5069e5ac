#pragma once

#include "gemm/gemm.h"

namespace aotllm::cuda {

/// What cuBLASLt leaves to do for one linear: y = f(product), rows contiguous. All pointers are on the device.
struct CublasLtEpilogue {
  Epilogue epilogue = Epilogue::kStore;
  Activation activation = Activation::kSilu;
  const void* product = nullptr;            ///< float32 for kLogits, else bf16: [m, n]; may be y, except for kGated
  const float* bias = nullptr;              ///< [n] or null
  const __nv_bfloat16* residual = nullptr;  ///< kResidual: [m, n], or null where the product holds it already
  void* y = nullptr;                        ///< [m, n], kGated: [m, n / 2]
  float softcap = 0.0f;
  int m = 0;
  int n = 0;
};
void cublaslt_epilogue(const CublasLtEpilogue& args, const Stream& stream);

}  // namespace aotllm::cuda
