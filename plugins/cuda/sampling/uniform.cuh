#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace aotllm::cuda {

/// Uniform in [0, 1), a multiple of 2^-53: the draw of `Sampler`, from Philox4x32-10 with the key `seed` and the
/// counter (position, sequence_index, 0, 0).
///
/// Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11, section 3.3.
__device__ inline double uniform_draw(std::uint64_t seed, std::uint32_t position, std::uint32_t sequence_index) {
  std::uint32_t counter[4] = {position, sequence_index, 0, 0};
  std::uint32_t key[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0];
    counter[2] = static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1];
    counter[1] = static_cast<std::uint32_t>(b);
    counter[3] = static_cast<std::uint32_t>(a);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  const std::uint64_t word = (static_cast<std::uint64_t>(counter[0]) << 32) | counter[1];
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

}  // namespace aotllm::cuda
