#include "runner/kv_allocation.h"

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

BlockCounts checked(const BlockCounts& counts, std::size_t num_groups, std::int32_t least, const char* what) {
  BlockCounts result{};
  for (std::size_t group = 0; group < num_groups; ++group) {
    if (counts[group] < least) {
      throw Error(
          ErrorKind::kInvalidRequest,
          cat("num_blocks: expected at least ", least, ' ', what, " for KV group ", group, ", got ", counts[group]),
          "num_blocks");
    }
    result[group] = counts[group];
  }
  return result;
}

}  // namespace

KvAllocation checked_allocation(const KvAllocation& allocation, std::size_t num_groups) {
  return {checked(allocation.device_blocks, num_groups, 1, "KV block"),
          checked(allocation.host_blocks, num_groups, 0, "host blocks")};
}

void check_block_copy(const BlockCopy& copy, const KvAllocation& allocation, std::size_t num_groups) {
  if (copy.group < 0 || static_cast<std::size_t>(copy.group) >= num_groups) {
    throw Error(ErrorKind::kInternal,
                cat("copy_blocks: expected a KV group in [0, ", num_groups, "), got ", copy.group));
  }
  const auto check_id = [&](KvTier tier, BlockId block) {
    const bool on_device = tier == KvTier::kDevice;
    const std::int32_t count = (on_device ? allocation.device_blocks : allocation.host_blocks)[copy.group];
    if (block < 0 || block >= count) {
      throw Error(ErrorKind::kInternal, cat("copy_blocks: expected ", on_device ? "device" : "host", " ids in [0, ",
                                            count, ") of KV group ", copy.group, ", got ", block));
    }
  };
  check_id(copy.from_tier, copy.from);
  check_id(copy.to_tier, copy.to);
}

}  // namespace aotllm
