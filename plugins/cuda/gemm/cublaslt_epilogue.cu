#include "gemm/cublaslt_epilogue.h"

#include <algorithm>

#include "chain.cuh"
#include "elementwise/bf16x8.cuh"

namespace aotllm::cuda {
namespace {

constexpr int kThreads = 256;

__device__ inline float activate(float x, Activation activation) {
  if (activation == Activation::kSilu) return x / (1.0f + expf(-x));
  constexpr float kSqrtTwoOverPi = 0.7978845608028654f;
  return 0.5f * x * (1.0f + tanhf(kSqrtTwoOverPi * (x + 0.044715f * x * x * x)));
}

// The same 8 values of gate and up lie side by side, in the product as in the bias.
__global__ void __launch_bounds__(kThreads) gated_kernel(const CublasLtEpilogue args) {
  release_successor();
  wait_for_predecessor();
  const int groups = args.n / 16;
  const std::int64_t total = static_cast<std::int64_t>(args.m) * groups;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += stride) {
    const __nv_bfloat16* from = static_cast<const __nv_bfloat16*>(args.product) + i * 16;
    float gate[8];
    float up[8];
    const uint4 packed_gate = load_activation(from);
    const uint4 packed_up = load_activation(from + 8);
    unpack(packed_gate, gate);
    unpack(packed_up, up);
    if (args.bias != nullptr) {
      const int group = static_cast<int>(i % groups);
      float gate_bias[8];
      float up_bias[8];
      load_weights(args.bias + group * 16, gate_bias);
      load_weights(args.bias + group * 16 + 8, up_bias);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        gate[e] += gate_bias[e];
        up[e] += up_bias[e];
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) gate[e] = activate(gate[e], args.activation) * up[e];
    static_cast<uint4*>(args.y)[i] = pack_bf16(gate);
  }
}

template <int kWidth>
__device__ void load_values(const float* address, float (&values)[kWidth]) {
  if constexpr (kWidth == 8) {
    const float4 low = __ldcg(reinterpret_cast<const float4*>(address));
    const float4 high = __ldcg(reinterpret_cast<const float4*>(address) + 1);
    const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) values[e] = all[e];
  } else {
    values[0] = __ldcg(address);
  }
}

template <int kWidth>
__device__ void load_values(const __nv_bfloat16* address, float (&values)[kWidth]) {
  if constexpr (kWidth == 8) {
    unpack(load_activation(address), values);
  } else {
    values[0] = unpack_bf16x2(__ldcg(reinterpret_cast<const unsigned short*>(address))).x;
  }
}

template <int kWidth>
__device__ void store_values(float* address, const float (&values)[kWidth]) {
  if constexpr (kWidth == 8) {
    reinterpret_cast<float4*>(address)[0] = {values[0], values[1], values[2], values[3]};
    reinterpret_cast<float4*>(address)[1] = {values[4], values[5], values[6], values[7]};
  } else {
    *address = values[0];
  }
}

template <int kWidth>
__device__ void store_values(__nv_bfloat16* address, const float (&values)[kWidth]) {
  if constexpr (kWidth == 8) {
    *reinterpret_cast<uint4*>(address) = pack_bf16(values);
  } else {
    *address = __float2bfloat16_rn(values[0]);
  }
}

// y = softcap(product + bias + residual), kWidth columns a thread. Grid: (columns, rows).
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) finish_kernel(const CublasLtEpilogue args) {
  release_successor();
  const int column = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * kWidth;
  float bias[kWidth] = {};
  if (args.bias != nullptr && column < args.n) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) bias[e] = __ldg(args.bias + column + e);
  }
  wait_for_predecessor();
  if (column >= args.n) return;
  for (int row = static_cast<int>(blockIdx.y); row < args.m; row += static_cast<int>(gridDim.y)) {
    const std::int64_t at = static_cast<std::int64_t>(row) * args.n + column;
    float values[kWidth];
    float residual[kWidth] = {};
    load_values(static_cast<const T*>(args.product) + at, values);
    if (args.residual != nullptr) load_values(args.residual + at, residual);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      values[e] = (values[e] + bias[e]) + residual[e];
      if (args.softcap > 0.0f) values[e] = args.softcap * tanhf(values[e] / args.softcap);
    }
    store_values(static_cast<T*>(args.y) + at, values);
  }
}

template <class T, int kWidth>
void launch_finish(const CublasLtEpilogue& args, const Stream& stream) {
  constexpr int kColumns = kThreads * kWidth;
  const dim3 grid(static_cast<unsigned>((args.n + kColumns - 1) / kColumns),
                  static_cast<unsigned>(std::min(args.m, 1024)));
  launch(finish_kernel<T, kWidth>, grid, dim3(kThreads), 0, stream, args);
}

template <class T>
void launch_finish(const CublasLtEpilogue& args, const Stream& stream) {
  if (args.n % 8 == 0) {
    launch_finish<T, 8>(args, stream);
  } else {
    launch_finish<T, 1>(args, stream);  // rows are not aligned to vectors
  }
}

}  // namespace

void cublaslt_epilogue(const CublasLtEpilogue& args, const Stream& stream) {
  if (args.epilogue == Epilogue::kGated) {
    const std::int64_t groups = static_cast<std::int64_t>(args.m) * (args.n / 16);
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((groups + kThreads - 1) / kThreads, 4096));
    launch(gated_kernel, dim3(blocks), dim3(kThreads), 0, stream, args);
    return;
  }
  if (args.epilogue == Epilogue::kLogits) {
    launch_finish<float>(args, stream);
  } else {
    launch_finish<__nv_bfloat16>(args, stream);
  }
}

}  // namespace aotllm::cuda
