#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace aotllm {

/// Threads that the CPU target uses unless told: CPUs of the process's affinity mask, limited by the CPU quota of its
/// cgroup (v2 or v1, rounded up). At least 1.
int default_num_threads();

/// CPUs that a cgroup v2 `cpu.max` grants, rounded up: "150000 100000" → 2. Empty for "max" (no limit) or other text.
std::optional<int> parse_cpu_max(std::string_view text);

/// The same of cgroup v1's `cpu.cfs_quota_us` and `cpu.cfs_period_us`; a quota of -1 is no limit.
std::optional<int> parse_cfs_quota(std::string_view quota, std::string_view period);

/// The smallest quota of the cgroups that `proc_cgroup` (the text of /proc/self/cgroup) names under `root`
/// (/sys/fs/cgroup), ancestors included. Empty where nothing limits.
std::optional<int> cgroup_cpu_limit(const std::string& root, std::string_view proc_cgroup);

}  // namespace aotllm
