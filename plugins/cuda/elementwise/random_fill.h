#pragma once

#include <cstddef>
#include <cstdint>

namespace aotllm::cuda {

/// Fills device memory with random finite values around 0, as bf16 or as E4M3: timing on zeros flatters. Waits for it.
void fill_random(std::uint8_t* data, std::size_t bytes, bool bf16);

}  // namespace aotllm::cuda
