#pragma once

#include <cstdint>

namespace aotllm::cuda {

/// Makes device `ordinal` the calling thread's, and checks that it and the driver can run an engine built for `sm`.
/// Throws Error(kEngineIncompatible) or, for an ordinal that does not exist, Error(kInvalidRequest): one sentence that
/// says what is needed, what is there and what to do.
void open_device(int ordinal, int sm);

/// Bytes of the current device that are free.
std::int64_t free_device_bytes();

/// Those of them that the KV cache may have: what is left is for CUDA graphs and kernels that are loaded later, and
/// for the granularity of allocations.
std::int64_t free_cache_bytes();

}  // namespace aotllm::cuda
