#include "support/cpu_topology.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

namespace aotllm {
namespace {

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string_view trim(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\n");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
}

std::optional<std::int64_t> parse_int(std::string_view text) {
  text = trim(text);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

void lower(std::optional<int>& limit, std::optional<int> other) {
  if (other && (!limit || *other < *limit)) limit = other;
}

/// CPUs in the affinity mask. The mask's size grows until the kernel accepts it (more than 1024 CPUs).
int affinity_cpus() {
  for (std::size_t cpus = 1024; cpus <= (std::size_t{1} << 20); cpus *= 2) {
    std::vector<cpu_set_t> mask(cpus / CPU_SETSIZE + 1);
    const std::size_t bytes = mask.size() * sizeof(cpu_set_t);
    if (::sched_getaffinity(0, bytes, mask.data()) == 0) return CPU_COUNT_S(bytes, mask.data());
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

/// Calls visit(folder) for `folder` and each ancestor up to `root`.
template <class Visit>
void for_each_ancestor(const std::string& root, std::string_view folder, Visit&& visit) {
  for (;;) {
    visit(root + std::string(folder));
    const auto slash = folder.rfind('/');
    if (folder.empty() || slash == std::string_view::npos) return;
    folder = folder.substr(0, slash);
  }
}

}  // namespace

std::optional<int> parse_cfs_quota(std::string_view quota, std::string_view period) {
  const auto q = parse_int(quota);
  const auto p = parse_int(period);
  if (!q || !p || *q <= 0 || *p <= 0) return std::nullopt;
  const std::int64_t cpus = *q / *p + (*q % *p != 0 ? 1 : 0);
  return static_cast<int>(std::clamp<std::int64_t>(cpus, 1, 1 << 20));
}

std::optional<int> parse_cpu_max(std::string_view text) {
  text = trim(text);
  const auto space = text.find(' ');
  if (space == std::string_view::npos) return std::nullopt;
  return parse_cfs_quota(text.substr(0, space), text.substr(space + 1));
}

std::optional<int> cgroup_cpu_limit(const std::string& root, std::string_view proc_cgroup) {
  std::optional<int> limit;
  while (!proc_cgroup.empty()) {  // lines of hierarchy:controllers:path
    const auto newline = proc_cgroup.find('\n');
    const std::string_view line = proc_cgroup.substr(0, newline);
    proc_cgroup = newline == std::string_view::npos ? std::string_view{} : proc_cgroup.substr(newline + 1);

    const auto first = line.find(':');
    const auto second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    std::string_view path = line.substr(second + 1);
    if (path == "/") path = {};

    if (controllers.empty()) {  // v2
      for_each_ancestor(root, path, [&](const std::string& folder) {
        if (const auto text = read_text(folder + "/cpu.max")) lower(limit, parse_cpu_max(*text));
      });
    } else if (controllers == "cpu" || controllers.find("cpu,") == 0 || controllers.find(",cpu") != controllers.npos) {
      for_each_ancestor(root + "/cpu", path, [&](const std::string& folder) {
        const auto quota = read_text(folder + "/cpu.cfs_quota_us");
        const auto period = read_text(folder + "/cpu.cfs_period_us");
        if (quota && period) lower(limit, parse_cfs_quota(*quota, *period));
      });
    }
  }
  return limit;
}

int default_num_threads() {
  int cpus = std::max(1, affinity_cpus());
  const auto proc_cgroup = read_text("/proc/self/cgroup");
  const auto limit = cgroup_cpu_limit("/sys/fs/cgroup", proc_cgroup ? *proc_cgroup : std::string());
  return limit ? std::min(cpus, *limit) : cpus;
}

}  // namespace aotllm
