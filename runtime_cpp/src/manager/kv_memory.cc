#include "manager/kv_memory.h"

#include <algorithm>
#include <limits>
#include <string>

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

[[noreturn]] void refuse(const char* param, const std::string& message) {
  throw Error(ErrorKind::kInvalidRequest, message, param);
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

KvMemoryPlanner::KvMemoryPlanner(const ModelShape& shape, const SchedulerConfig& scheduler)
    : shape_(shape), scheduler_(scheduler) {}

std::int64_t KvMemoryPlanner::blocks_of(int group, std::int64_t units) const {
  const std::int64_t in_first = scheduler_.most_blocks(shape_.max_seq_len, 0);
  const std::int64_t in_group = scheduler_.most_blocks(shape_.max_seq_len, group);
  if (in_group >= in_first || units == 0) {
    return units;
  }
  // One whole sequence must fit wherever it fits the first group.
  const std::int64_t whole = std::min(units, in_group);
  return std::max({ceil_div(units * in_group, in_first), ceil_div(units, 2), whole});
}

std::int64_t KvMemoryPlanner::bytes_of(std::int64_t units) const {
  std::int64_t bytes = 0;
  for (std::size_t group = 0; group < shape_.kv_groups.size(); ++group) {
    bytes += blocks_of(static_cast<int>(group), units) * shape_.kv_groups[group].bytes_per_block;
  }
  return bytes;
}

/// Most units whose bytes are at most `bytes`.
std::int64_t KvMemoryPlanner::units_in(std::int64_t bytes) const {
  std::int64_t low = 0;
  std::int64_t high = std::numeric_limits<std::int32_t>::max();
  while (low < high) {  // bytes_of grows with the units; low always fits
    const std::int64_t middle = low + (high - low + 1) / 2;
    if (bytes_of(middle) <= bytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Units for max_batch_size sequences of full length within a quarter of the free memory (nine tenths of a device's
/// own). Where that holds not even one such sequence, as much of one as three quarters of the memory hold.
std::int64_t KvMemoryPlanner::default_units(std::int32_t max_batch_size, const FreeMemory& free) const {
  const std::optional<std::int64_t>& free_bytes = free.device_bytes;
  const std::int64_t one = scheduler_.most_blocks(shape_.max_seq_len, 0);
  const std::int64_t wanted = std::min<std::int64_t>(one * max_batch_size, std::numeric_limits<std::int32_t>::max());
  if (bytes_of(1) == 0) {
    return wanted;
  }
  if (!free_bytes) {
    return one;
  }
  // A device of its own is there for the cache; the host has other uses for its memory.
  const std::int64_t share = units_in(free.shared ? *free_bytes / 4 : *free_bytes / 10 * 9);
  const std::int64_t units = share >= one ? std::min(wanted, share) : std::min(one, units_in(*free_bytes / 4 * 3));
  if (units < 1) {
    refuse("num_kv_blocks",
           cat("no memory for the KV cache: ", *free_bytes, " bytes are free, and one block of ",
               shape_.tokens_per_block, " tokens takes ", bytes_of(1), ". Free some memory or take a smaller engine"));
  }
  return units;
}

std::int64_t KvMemoryPlanner::units_for(const ManagerConfig& config, std::int32_t max_batch_size,
                                        const FreeMemory& free) const {
  const std::optional<std::int64_t>& free_bytes = free.device_bytes;
  const auto at_least_0 = [](const char* param, auto value) {
    if (!(value >= 0)) {
      refuse(param, cat(param, " is ", value, "; it must be at least 1, or 0 to size the KV cache otherwise"));
    }
    return value > 0 ? 1 : 0;
  };
  const int ways =
      at_least_0("num_kv_blocks", config.num_kv_blocks) + at_least_0("kv_cache_tokens", config.kv_cache_tokens) +
      at_least_0("kv_cache_bytes", config.kv_cache_bytes) + at_least_0("kv_cache_fraction", config.kv_cache_fraction);
  if (ways > 1) {
    refuse("kv_cache_bytes",
           "the KV memory is given in several ways; give one of num_kv_blocks, kv_cache_tokens, kv_cache_bytes and "
           "kv_cache_fraction");
  }
  if (config.num_kv_blocks > 0) {
    return config.num_kv_blocks;
  }
  if (config.kv_cache_tokens > 0) {
    return ceil_div(std::min(config.kv_cache_tokens, std::numeric_limits<std::int64_t>::max() / 2),
                    shape_.tokens_per_block);
  }
  if (config.kv_cache_fraction > 1.0) {
    refuse("kv_cache_fraction",
           cat("kv_cache_fraction is ", config.kv_cache_fraction, "; it must be in (0, 1], a part of the free memory"));
  }
  const bool has_fraction = config.kv_cache_fraction > 0.0;
  if (has_fraction && !free_bytes) {
    refuse("kv_cache_fraction", "the free memory is not known here; give the KV memory in bytes or tokens");
  }
  if (has_fraction || config.kv_cache_bytes > 0) {
    const std::int64_t bytes =
        has_fraction ? static_cast<std::int64_t>(static_cast<double>(*free_bytes) * config.kv_cache_fraction)
                     : config.kv_cache_bytes;
    const std::int64_t units = units_in(bytes);
    if (units < 1) {
      const char* param = has_fraction ? "kv_cache_fraction" : "kv_cache_bytes";
      refuse(param, cat(param, " gives ", bytes, " bytes; one block of ", shape_.tokens_per_block, " tokens takes ",
                        bytes_of(1)));
    }
    return units;
  }
  return default_units(max_batch_size, free);
}

/// Throws Error(kInvalidRequest) for more than is free, before anything of that size is made: the kernel hands out
/// pages that it does not have.
void KvMemoryPlanner::check_free(const KvMemory& memory, const ManagerConfig& config, const FreeMemory& free) const {
  if (free.device_bytes && memory.device_bytes > *free.device_bytes) {
    const char* param = config.kv_cache_bytes > 0    ? "kv_cache_bytes"
                        : config.kv_cache_tokens > 0 ? "kv_cache_tokens"
                                                     : "num_kv_blocks";
    refuse(param, cat(param, " asks for ", memory.groups.front().device_blocks, " blocks, which take ",
                      memory.device_bytes, " bytes; ", *free.device_bytes, " are free"));
  }
  if (!free.host_bytes) {
    return;
  }
  const std::int64_t left = *free.host_bytes - (free.shared ? memory.device_bytes : 0);
  if (memory.host_bytes > left) {
    refuse("kv_host_bytes", cat("kv_host_bytes asks for ", memory.host_bytes, " bytes; ", left, " are free",
                                free.shared ? " beside those of the KV cache itself" : ""));
  }
}

bool KvMemoryPlanner::fits(const KvMemory& memory, std::int32_t num_tokens) const {
  for (std::size_t group = 0; group < memory.groups.size(); ++group) {
    if (scheduler_.most_blocks(num_tokens, static_cast<int>(group)) > memory.groups[group].device_blocks) {
      return false;
    }
  }
  return true;
}

KvMemory KvMemoryPlanner::plan(const ManagerConfig& config, std::int32_t max_batch_size, const FreeMemory& free) const {
  const std::int64_t units = units_for(config, max_batch_size, free);
  if (units > std::numeric_limits<std::int32_t>::max()) {
    const char* param = config.kv_cache_tokens > 0 ? "kv_cache_tokens" : "kv_cache_bytes";
    refuse(param, cat(param, " asks for ", units, " blocks; at most 2^31 - 1 are possible"));
  }
  if (config.kv_host_bytes < 0) {
    refuse("kv_host_bytes", cat("kv_host_bytes is ", config.kv_host_bytes, "; it must be at least 0"));
  }
  const std::int64_t host_units = config.kv_host_bytes == 0 ? 0 : units_in(config.kv_host_bytes);
  KvMemory memory;
  memory.tokens_per_block = shape_.tokens_per_block;
  for (std::size_t group = 0; group < shape_.kv_groups.size(); ++group) {
    const KvGroupShape& shape = shape_.kv_groups[group];
    const auto device_blocks = static_cast<std::int32_t>(blocks_of(static_cast<int>(group), units));
    const auto host_blocks = static_cast<std::int32_t>(blocks_of(static_cast<int>(group), host_units));
    memory.groups.push_back({shape.window, shape.bytes_per_block, device_blocks, host_blocks});
    memory.device_bytes += device_blocks * shape.bytes_per_block;
    memory.host_bytes += host_blocks * shape.bytes_per_block;
  }
  check_free(memory, config, free);
  memory.tokens = units * shape_.tokens_per_block;
  std::int32_t low = 0;
  std::int32_t high = shape_.max_seq_len;
  while (low < high) {  // the longest sequence that fits alone
    const std::int32_t middle = low + (high - low + 1) / 2;
    if (fits(memory, middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  memory.max_seq_len = low;
  memory.sequences_at_max_len = std::numeric_limits<std::int32_t>::max();
  for (std::size_t group = 0; group < memory.groups.size(); ++group) {
    const std::int32_t one = std::max(scheduler_.most_blocks(low, static_cast<int>(group)), 1);
    memory.sequences_at_max_len = std::min(memory.sequences_at_max_len, memory.groups[group].device_blocks / one);
  }
  return memory;
}

}  // namespace aotllm
