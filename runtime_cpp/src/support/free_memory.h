#pragma once

#include <cstdint>
#include <istream>
#include <optional>

namespace aotllm {

/// Bytes that this process can still take without swapping: MemAvailable of /proc/meminfo, and what the memory limit of
/// its cgroup (v2) leaves, whichever is less. Nullopt where the system tells neither.
std::optional<std::int64_t> free_memory();

/// The number after the line's first word `key`, e.g. "MemAvailable:" or "inactive_file"; nullopt where there is none.
std::optional<std::int64_t> read_field(std::istream& text, const char* key);

}  // namespace aotllm
