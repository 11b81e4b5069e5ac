#pragma once

#include <cstdint>

namespace aotllm::testing_support {

/// Calls of operator new in this process so far.
std::uint64_t allocation_count() noexcept;

}  // namespace aotllm::testing_support
