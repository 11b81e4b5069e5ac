#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace aotllm::cuda {

/// Copies `bytes` (a multiple of 4) between the device's memory and page-locked memory of the host, by the addresses
/// under which the device knows them, 16-byte aligned. A copy engine needs some 6 µs to begin behind a kernel, and the
/// next kernel as long to begin behind it: what is small goes faster by a kernel. It begins when what the
/// stream did before has ended; a kernel launched programmatically behind it may begin before it has.
void copy_mapped(void* to, const void* from, std::size_t bytes, cudaStream_t stream);

}  // namespace aotllm::cuda
