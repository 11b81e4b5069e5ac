#include "runner/kv_pool.h"

#include <cstring>
#include <new>
#include <optional>
#include <string>

#include "aotllm/errors.h"
#include "runner/kv_allocation.h"
#include "support/free_memory.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// Bytes of all blocks; nullopt above 2^63.
std::optional<std::int64_t> kv_bytes(const KvPlan& plan, const BlockCounts& num_blocks) {
  std::int64_t total = 0;
  bool overflow = false;
  for (const KvLayer& layer : plan.layers) {
    std::int64_t bytes = 0;
    overflow |= __builtin_mul_overflow(2 * plan.block_bytes(layer), std::int64_t{num_blocks[layer.group]}, &bytes);
    overflow |= __builtin_add_overflow(total, bytes, &total);
  }
  if (overflow) return std::nullopt;
  return total;
}

/// Bytes between two blocks. Parts of one layer that are a multiple of a large power of two apart would meet in a few
/// sets of a cache: then each block begins some lines further in them than the one before.
constexpr std::int64_t padding(std::int64_t block_bytes) {
  constexpr std::int64_t kFewSets = 16 << 10;
  constexpr std::int64_t kFurther = 2 << 10;
  return block_bytes > 0 && block_bytes % kFewSets == 0 ? kFurther : 0;
}

std::string describe(const BlockCounts& counts, std::size_t num_groups) {
  std::string text;
  for (std::size_t group = 0; group < num_groups; ++group) text += cat(group == 0 ? "" : " + ", counts[group]);
  return text;
}

}  // namespace

KvMemory::KvMemory(const KvPlan& plan, const BlockCounts& num_blocks) : layers_(plan.layers.size()) {
  std::int64_t bytes = 0;
  for (std::size_t index = 0; index < plan.groups.size(); ++index) {
    Group group{.offset = bytes};
    for (const int number : plan.groups[index].layers) {
      const KvLayer& layer = plan.layers[number];
      const std::int64_t half = plan.block_bytes(layer);
      layers_[number] = {bytes + group.bytes, 0, half / layer.num_kv_heads, half};
      group.bytes += 2 * half;
    }
    group.block_stride = group.bytes + padding(group.bytes);
    for (const int number : plan.groups[index].layers) layers_[number].block_stride = group.block_stride;
    groups_.push_back(group);
    bytes += group.block_stride * num_blocks[index];
  }
  memory_ = PageBuffer(static_cast<std::size_t>(bytes));
}

KvPool::KvPool(const KvPlan& plan, const KvAllocation& allocation)
    : allocation_(allocation), device_(plan, allocation.device_blocks), host_(plan, allocation.host_blocks) {}

std::vector<KvPool> make_kv_pools(const std::vector<const KvPlan*>& ranks, const KvAllocation& asked) {
  const std::size_t num_groups = ranks.front()->groups.size();
  const KvAllocation allocation = checked_allocation(asked, num_groups);
  std::int64_t bytes = 0;
  bool overflow = false;
  for (const KvPlan* plan : ranks) {
    for (const BlockCounts& counts : {allocation.device_blocks, allocation.host_blocks}) {
      const auto part = kv_bytes(*plan, counts);
      overflow |= !part || __builtin_add_overflow(bytes, *part, &bytes);
    }
  }
  // The kernel hands out pages that it does not have and kills the process that touches them: ask it beforehand.
  const std::int64_t available = free_memory().value_or(INT64_MAX);
  try {
    if (overflow || bytes > available) throw std::bad_alloc();
    std::vector<KvPool> pools;
    for (const KvPlan* plan : ranks) pools.emplace_back(*plan, allocation);
    return pools;
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("no memory for ", describe(allocation.device_blocks, num_groups), " KV blocks and ",
                    describe(allocation.host_blocks, num_groups), " host blocks (",
                    overflow ? "more than 2^63" : std::to_string(bytes), " bytes, ", available,
                    " are free); ask for fewer blocks"),
                "num_blocks");
  }
}

void KvPool::copy_blocks(std::span<const BlockCopy> copies) {
  for (const BlockCopy& copy : copies) check_block_copy(copy, allocation_, device_.num_groups());
  for (const BlockCopy& copy : copies) {
    if (copy.from_tier == copy.to_tier && copy.from == copy.to) continue;
    const std::span<std::uint8_t> from = memory(copy.from_tier).block(copy.group, copy.from);
    const std::span<std::uint8_t> to = memory(copy.to_tier).block(copy.group, copy.to);
    std::memcpy(to.data(), from.data(), from.size());
  }
}

}  // namespace aotllm
