#include <algorithm>
#include <cfloat>
#include <string>

#include "aotllm/errors.h"
#include "chain.cuh"
#include "elementwise/bf16x8.cuh"
#include "elementwise/elementwise.h"
#include "elementwise/rms_norm_plan.h"

namespace aotllm::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / 32;  // a multiple of 4
constexpr int kMostVectors = 8;
constexpr float kLargestCode = 448.0f;  // of E4M3

enum class Codes { kNone, kPerRow, kPerBlock };

// What all threads of a block know of a row: Σ x² and max |x · weight|. Magnitudes are compared as bit patterns, which
// order as the floats do and let a NaN win.
struct RowTotals {
  float squares;
  float largest;
};

// A word for each warp, zero where there is no such warp.
struct alignas(16) ReductionScratch {
  float squares[kMaxWarps];
  unsigned largest[kMaxWarps];
};

// One barrier; the caller alternates between two scratches, so that no second one is needed before the next row.
template <bool kLargest>
__device__ RowTotals reduce_row(float squares, unsigned largest, ReductionScratch& scratch) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
  if constexpr (kLargest) largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if (threadIdx.x % 32 == 0) {
    scratch.squares[warp] = squares;
    if constexpr (kLargest) scratch.largest[warp] = largest;
  }
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int first = 0; first < kMaxWarps; first += 4) {
    const float4 sums = *reinterpret_cast<const float4*>(scratch.squares + first);
    squares += (sums.x + sums.y) + (sums.z + sums.w);
    if constexpr (kLargest) {
      const uint4 most = *reinterpret_cast<const uint4*>(scratch.largest + first);
      largest = max(largest, max(max(most.x, most.y), max(most.z, most.w)));
    }
  }
  return {squares, __uint_as_float(largest)};
}

__device__ inline unsigned magnitude(float value) {
  return __float_as_uint(value) & 0x7FFFFFFFu;
}

// At least FLT_MIN, so that its reciprocal is finite: only rows below 5e-36 see the difference.
__device__ inline float scale_of(float largest) {
  return largest == 0.0f ? 1.0f : fmaxf(largest * (1.0f / kLargestCode), FLT_MIN);
}

// A thread's part of the rows of its block: vectors first + i · threads, i < kVectors. y = (x · weight) · rstd, in this
// order, so that max |y| = max |x · weight| · rstd exactly and one barrier serves both reductions.
template <int kVectors, Codes kCodes, bool kNormalizes>
struct RowWorker {
  static constexpr bool kInRegisters = kVectors <= 4;  // weights stay there, the next row is fetched ahead
  static constexpr int kKept = kInRegisters && kNormalizes ? kVectors : 1;

  const RmsNormArgs& args;
  // Known when compiling where registers are short: offsets become immediates.
  const int threads = kVectors == kMostVectors ? kMaxThreads : static_cast<int>(blockDim.x);
  const int first = static_cast<int>(threadIdx.x);
  const int vectors = args.width / 8;
  float kept[kKept][8];

  __device__ explicit RowWorker(const RmsNormArgs& a) : args(a) {
    if constexpr (kInRegisters && kNormalizes) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (inside(i)) load_weights(args.weight + at(i), kept[i]);
      }
    }
  }

  __device__ int at(int i) const { return (first + i * threads) * 8; }
  __device__ bool inside(int i) const { return first + i * threads < vectors; }

  __device__ void load_row(int row, uint4 (&x)[kVectors]) const {
    const std::int64_t source = args.pick != nullptr ? __ldcg(args.pick + row) : row;
    const __nv_bfloat16* from = args.x + source * args.width;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) x[i] = inside(i) ? load_activation(from + at(i)) : uint4{};
  }

  // x · weight; zeros stay zeros where this thread has no vector i.
  __device__ void multiply(int i, const uint4& packed, float (&values)[8]) const {
    unpack(packed, values);
    if constexpr (!kNormalizes) return;
    if (!inside(i)) return;
    if constexpr (kInRegisters) {
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] *= kept[i][e];
    } else {
      float weights[8];
      load_weights(args.weight + at(i), weights);
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] *= weights[e];
    }
  }

  __device__ void accumulate(const uint4 (&x)[kVectors], float& squares, unsigned& largest) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float values[8];
      unpack(x[i], values);
#pragma unroll
      for (float value : values) squares += value * value;
      if constexpr (kCodes == Codes::kPerRow) {
        multiply(i, x[i], values);
#pragma unroll
        for (float value : values) largest = max(largest, magnitude(value));
      }
    }
  }

  // The scale of the 128 values that 16 lanes hold: threads is a multiple of 32 and width of 128, so that they are one
  // block. All lanes take part.
  __device__ float block_scale(int row, int i, const float (&y)[8]) const {
    unsigned most = 0;
#pragma unroll
    for (float value : y) most = max(most, magnitude(value));
#pragma unroll
    for (int step = 8; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
    const float scale = scale_of(__uint_as_float(most));
    if (inside(i) && first % 16 == 0) {
      args.y_scales[static_cast<std::int64_t>(row) * (vectors / 16) + (first + i * threads) / 16] = scale;
    }
    return scale;
  }

  __device__ void emit(int row, int i, const uint4& packed, float rstd, float scale) const {
    const std::int64_t begin = static_cast<std::int64_t>(row) * args.width + at(i);
    float y[8];
    multiply(i, packed, y);
#pragma unroll
    for (float& value : y) value *= rstd;
    if constexpr (kCodes == Codes::kPerBlock) scale = block_scale(row, i, y);
    if (!inside(i)) return;
    if constexpr (kCodes != Codes::kNone) {
      const float inverse = __fdividef(1.0f, scale);
      float scaled[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) scaled[e] = y[e] * inverse;
      *reinterpret_cast<uint2*>(args.y_fp8 + begin) = pack_fp8(scaled);
    }
    if (args.y == nullptr) return;
    if (kCodes == Codes::kNone && args.residual != nullptr) {
      float added[8];
      unpack(load_activation(args.residual + begin), added);
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] += added[e];
    }
    *reinterpret_cast<uint4*>(args.y + begin) = pack_bf16(y);
  }
};

// Blocks walk over rows: weights are loaded once, before the predecessor has ended, and the next row is on its way
// while the present one is reduced.
template <int kVectors, Codes kCodes, bool kNormalizes>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(const RmsNormArgs args) {
  using Worker = RowWorker<kVectors, kCodes, kNormalizes>;
  constexpr bool kAhead = Worker::kInRegisters;
  __shared__ ReductionScratch scratch[2];
  release_successor();
  if (threadIdx.x < kMaxWarps) {
    for (ReductionScratch& half : scratch) half.squares[threadIdx.x] = half.largest[threadIdx.x] = 0;
  }
  const Worker worker(args);
  const float inverse_width = 1.0f / static_cast<float>(args.width);
  if constexpr (kNormalizes || kCodes == Codes::kPerRow) __syncthreads();
  wait_for_predecessor();
  uint4 x[kVectors];
  worker.load_row(static_cast<int>(blockIdx.x), x);
  int parity = 0;
  for (int row = static_cast<int>(blockIdx.x); row < args.m; parity ^= 1) {
    const int next = row + static_cast<int>(gridDim.x);
    uint4 following[kVectors];
    if (kAhead && next < args.m) worker.load_row(next, following);
    float rstd = 1.0f;
    float scale = 1.0f;
    if constexpr (kNormalizes || kCodes == Codes::kPerRow) {
      float squares = 0.0f;
      unsigned largest = 0;
      worker.accumulate(x, squares, largest);
      const RowTotals totals = reduce_row<kCodes == Codes::kPerRow>(squares, largest, scratch[parity]);
      if constexpr (kNormalizes) rstd = rsqrtf(totals.squares * inverse_width + args.eps);
      scale = scale_of(totals.largest * rstd);
    }
    if (kCodes == Codes::kPerRow && threadIdx.x == 0) args.y_scales[row] = scale;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) worker.emit(row, i, x[i], rstd, scale);
    if constexpr (kAhead) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) x[i] = following[i];
    } else if (next < args.m) {
      worker.load_row(next, x);
    }
    row = next;
  }
}

// As many blocks as run at once.
int count_blocks(void (*kernel)(RmsNormArgs), int m, int threads) {
  int device = 0;
  int multiprocessors = 0;
  int resident = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  if (m <= multiprocessors) return m;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0), "occupancy of rms_norm");
  return std::min(m, multiprocessors * std::max(resident, 1));
}

using Kernel = void (*)(RmsNormArgs);

template <int kVectors, bool kNormalizes>
Kernel choose_codes(const RmsNormArgs& args) {
  if (args.y_fp8 == nullptr) return rms_norm_kernel<kVectors, Codes::kNone, kNormalizes>;
  if (args.per_block) return rms_norm_kernel<kVectors, Codes::kPerBlock, kNormalizes>;
  return rms_norm_kernel<kVectors, Codes::kPerRow, kNormalizes>;
}

template <int kVectors>
Kernel choose_kernel(const RmsNormArgs& args) {
  return args.weight != nullptr ? choose_codes<kVectors, true>(args) : choose_codes<kVectors, false>(args);
}

Kernel choose_kernel(const RmsNormArgs& args, int vectors) {
  switch (vectors) {
    case 1:
      return choose_kernel<1>(args);
    case 2:
      return choose_kernel<2>(args);
    case 4:
      return choose_kernel<4>(args);
    default:
      return choose_kernel<8>(args);
  }
}

void check_args(const RmsNormArgs& args) {
  const auto fail = [](const std::string& text) { throw Error(ErrorKind::kInternal, "rms_norm: " + text); };
  const int unit = args.y_fp8 != nullptr && args.per_block ? 128 : 8;
  if (args.width <= 0 || args.width % unit != 0) {
    fail("width " + std::to_string(args.width) + " is not a positive multiple of " + std::to_string(unit));
  }
  if (args.y == nullptr && args.y_fp8 == nullptr) fail("there is no output");
  if (args.y_fp8 != nullptr && args.y_scales == nullptr) fail("y_fp8 needs y_scales");
  if (args.y_fp8 != nullptr && args.residual != nullptr) fail("a residual goes with bf16 output only");
}

}  // namespace

RmsNormPlan rms_norm_plan_of(int width, int vectors) {
  const int threads = (width / 8 + vectors - 1) / vectors;
  if (threads > kMaxThreads) return {vectors, 0};
  return {vectors, vectors == kMostVectors ? kMaxThreads : (threads + 31) / 32 * 32};
}

RmsNormPlan plan_rms_norm(int width) {
  // Measured on an H200: few warps win at one row and at many, but a block of more than two vectors a thread holds too
  // many registers for a second one beside it.
  if (width <= 2048) return rms_norm_plan_of(width, 1);
  for (const int vectors : {2, 4}) {
    const RmsNormPlan plan = rms_norm_plan_of(width, vectors);
    if (plan.threads > 0) return plan;
  }
  return rms_norm_plan_of(width, kMostVectors);
}

void rms_norm(const RmsNormArgs& args, const RmsNormPlan& plan, const Stream& stream) {
  check_args(args);
  if (plan.threads == 0) {
    throw Error(ErrorKind::kInternal, "rms_norm: width " + std::to_string(args.width) + " is over 32768");
  }
  if (args.m <= 0) return;
  const Kernel kernel = choose_kernel(args, plan.vectors);
  const auto blocks = static_cast<unsigned>(count_blocks(kernel, args.m, plan.threads));
  launch(kernel, dim3(blocks), dim3(static_cast<unsigned>(plan.threads)), 0, stream, args);
}

void rms_norm(const RmsNormArgs& args, const Stream& stream) {
  check_args(args);
  rms_norm(args, plan_rms_norm(args.width), stream);
}

}  // namespace aotllm::cuda
