#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "aotllm/model_runner.h"

namespace aotllm::cuda {

constexpr std::uint32_t kMinusInfinity = 0x007FFFFF;  // key of -inf
constexpr std::uint32_t kPlusInfinity = 0xFF800000;   // that of +inf; NaN is above it

/// Increases with the logit; -0 and 0 are equal, and NaN of any kind, which an addition makes one, is above all. Never
/// 0.
__device__ inline std::uint32_t key_of(float logit) {
  const std::uint32_t bits = __float_as_uint(logit + 0.0F);
  return bits ^ (static_cast<std::uint32_t>(static_cast<std::int32_t>(bits) >> 31) | 0x80000000U);
}
__device__ inline float logit_of(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000U) != 0 ? key ^ 0x80000000U : ~key);
}

__device__ inline std::uint64_t warp_max(std::uint64_t value) {
  for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(~0U, value, offset));
  return value;
}

/// Of the largest key of a row: whether a token can be chosen from it.
__device__ inline bool is_finite_key(std::uint32_t key) {
  return key > kMinusInfinity && key < kPlusInfinity;
}

/// What a row without a token says, whose largest key is `key`.
__device__ inline std::int32_t no_token(std::uint32_t key) {
  return key <= kMinusInfinity ? kNothingAllowed : kDamagedRow;
}

/// How blocks split a row: at multiples of 16 bytes, into units of 4 tokens. Up to 3 tokens are left over before the
/// units, for the first block, and up to 3 behind them, for the last one.
struct RowSplit {
  int head;   // tokens before the first unit
  int units;  // of the row
  int begin;  // of the block's units
  int end;

  __host__ __device__ static int units_per_block(int vocab_size, int num_blocks) {
    return (vocab_size / 4 + num_blocks - 1) / num_blocks;
  }

  __device__ RowSplit(const float* row, int vocab_size, int block, int num_blocks) {
    head = min(static_cast<int>((16 - reinterpret_cast<std::uintptr_t>(row) % 16) % 16 / 4), vocab_size);
    units = (vocab_size - head) / 4;
    const int share = units_per_block(vocab_size, num_blocks);
    begin = min(block * share, units);
    end = min(begin + share, units);
  }

  /// First token behind the units.
  __device__ int tail() const { return head + 4 * units; }
};

}  // namespace aotllm::cuda
