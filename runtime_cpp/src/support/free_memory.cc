#include "support/free_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace aotllm {
namespace {

/// A cgroup file with one number in it; nullopt for "max" or no such file.
std::optional<std::int64_t> read_number(const char* path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  if (file >> value) {
    return value;
  }
  return std::nullopt;
}

/// What is left below the cgroup's limit. Pages of files that were not used lately are given up first, hence count as
/// free.
std::optional<std::int64_t> cgroup_free_memory() {
  const auto limit = read_number("/sys/fs/cgroup/memory.max");
  const auto used = read_number("/sys/fs/cgroup/memory.current");
  if (!limit || !used) {
    return std::nullopt;
  }
  std::ifstream stat("/sys/fs/cgroup/memory.stat");
  return std::max<std::int64_t>(*limit - *used + read_field(stat, "inactive_file").value_or(0), 0);
}

}  // namespace

std::optional<std::int64_t> read_field(std::istream& text, const char* key) {
  for (std::string line; std::getline(text, line);) {
    std::istringstream words(line);
    std::string word;
    std::int64_t value = 0;
    if (words >> word && word == key && words >> value) {
      return value;
    }
  }
  return std::nullopt;
}

std::optional<std::int64_t> free_memory() {
  std::ifstream meminfo("/proc/meminfo");
  std::optional<std::int64_t> free;
  if (const auto kilobytes = read_field(meminfo, "MemAvailable:")) {
    free = *kilobytes * 1024;
  }
  if (const auto of_cgroup = cgroup_free_memory()) {
    free = std::min(free.value_or(*of_cgroup), *of_cgroup);
  }
  return free;
}

}  // namespace aotllm
