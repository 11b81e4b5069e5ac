#include <string>

#include "aotllm/errors.h"
#include "chain.cuh"
#include "elementwise/bf16x8.cuh"
#include "elementwise/elementwise.h"

namespace aotllm::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kVectors = 4;  // of a thread: enough loads in flight at one row
constexpr int kChunk = kThreads * kVectors;

// Grid: (rows, chunks of kChunk vectors of a row). A token below 0 gives zeros, so that a bad id reads nothing.
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const std::int32_t* tokens, const __nv_bfloat16* table, int width, float scale, __nv_bfloat16* out,
                     TokenRange held, const std::int32_t* fed) {
  release_successor();
  wait_for_predecessor();
  int id = __ldcg(tokens + blockIdx.x);
  if (id < 0 && fed != nullptr) id = __ldcg(fed - 1 - id);
  const int token = id < 0 ? -1 : id - held.begin;
  const bool is_held = token >= 0 && token < held.count;
  const int vectors = width / 8;
  const int first = static_cast<int>(blockIdx.y) * kChunk + static_cast<int>(threadIdx.x);
  const uint4* from = reinterpret_cast<const uint4*>(table + static_cast<std::int64_t>(token) * width);
  uint4* to = reinterpret_cast<uint4*>(out + static_cast<std::int64_t>(blockIdx.x) * width);
  uint4 packed[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = first + i * kThreads;
    packed[i] = is_held && v < vectors ? __ldg(from + v) : uint4{};
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = first + i * kThreads;
    float values[8];
    unpack(packed[i], values);
    for (float& value : values) value *= scale;
    if (v < vectors) to[v] = pack_bf16(values);
  }
}

}  // namespace

void embedding(const std::int32_t* tokens, int m, const __nv_bfloat16* table, int width, float scale,
               __nv_bfloat16* out, const Stream& stream, TokenRange held, const std::int32_t* fed) {
  if (width <= 0 || width % 8 != 0) {
    throw Error(ErrorKind::kInternal, "embedding: width " + std::to_string(width) + " is not a positive multiple of 8");
  }
  if (m <= 0) return;
  const dim3 grid(static_cast<unsigned>(m), static_cast<unsigned>((width / 8 + kChunk - 1) / kChunk));
  launch(embedding_kernel, grid, dim3(kThreads), 0, stream, tokens, table, width, scale, out, held, fed);
}

}  // namespace aotllm::cuda
