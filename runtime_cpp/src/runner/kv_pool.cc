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

std::string describe(const BlockCounts& counts, std::size_t num_groups) {
  std::string text;
  for (std::size_t group = 0; group < num_groups; ++group) text += cat(group == 0 ? "" : " + ", counts[group]);
  return text;
}

}  // namespace

KvMemory::KvMemory(const KvPlan& plan, const BlockCounts& num_blocks) {
  std::int64_t bytes = 0;
  for (const KvLayer& layer : plan.layers) {
    const std::int64_t stride = plan.block_bytes(layer);
    layers_.push_back({bytes, stride, stride / layer.num_kv_heads, num_blocks[layer.group]});
    bytes += 2 * stride * num_blocks[layer.group];
  }
  memory_ = PageBuffer(static_cast<std::size_t>(bytes));
}

KvPool::KvPool(const KvPlan& plan, const KvAllocation& allocation)
    : allocation_(allocation), device_(plan, allocation.device_blocks), host_(plan, allocation.host_blocks) {
  for (const KvGroup& group : plan.groups) group_layers_.push_back(group.layers);
}

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
  for (const BlockCopy& copy : copies) check_block_copy(copy, allocation_, group_layers_.size());
  for (const BlockCopy& copy : copies) {
    if (copy.from_tier == copy.to_tier && copy.from == copy.to) continue;
    const KvMemory& from = memory(copy.from_tier);
    const KvMemory& to = memory(copy.to_tier);
    for (const int layer : group_layers_[copy.group]) {
      const auto bytes = static_cast<std::size_t>(from.block_stride(layer));
      std::memcpy(to.k(layer, copy.to, 0), from.k(layer, copy.from, 0), bytes);
      std::memcpy(to.v(layer, copy.to, 0), from.v(layer, copy.from, 0), bytes);
    }
  }
}

}  // namespace aotllm
