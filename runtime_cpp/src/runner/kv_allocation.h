#pragma once

#include <cstddef>

#include "aotllm/model_runner.h"

namespace aotllm {

/// The counts of the first `num_groups` groups, those of others 0. Throws Error(kInvalidRequest) for ones that are not
/// positive (negative, on the host).
KvAllocation checked_allocation(const KvAllocation& allocation, std::size_t num_groups);

/// Throws Error(kInternal) where a group or an id of `copy` is out of range.
void check_block_copy(const BlockCopy& copy, const KvAllocation& allocation, std::size_t num_groups);

}  // namespace aotllm
