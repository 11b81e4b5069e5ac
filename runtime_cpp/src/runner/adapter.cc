#include "aotllm/adapter.h"

#include <array>
#include <set>
#include <string>
#include <utility>

#include "aotllm/errors.h"
#include "runner/adapter_sites.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr std::array<const char*, kNumAdapterModules> kModuleNames = {"q", "k", "v", "o", "gate", "up", "down"};

std::string name_of(const LowRankUpdate& update) {
  return cat("layers.", update.layer, '.', adapter_module_name(update.module));
}

template <class Expected, class Got>
[[noreturn]] void fail(const std::string& tensor, const Expected& expected, const Got& got) {
  throw Error(ErrorKind::kInvalidRequest, cat("adapter: ", tensor, ": expected ", expected, ", got ", got), "adapter");
}

std::string shape(std::int64_t rows, std::int64_t columns) {
  return cat("shape [", rows, ", ", columns, ']');
}

void check_matrix(const std::string& tensor, const std::vector<float>& values, std::int64_t rows,
                  std::int64_t columns) {
  if (static_cast<std::int64_t>(values.size()) == rows * columns) return;
  fail(tensor, cat(rows * columns, " values for ", shape(rows, columns)), values.size());
}

}  // namespace

const char* adapter_module_name(AdapterModule module) noexcept {
  return kModuleNames[static_cast<std::size_t>(module)];
}

bool parse_adapter_module(std::string_view name, AdapterModule& module) noexcept {
  for (std::size_t i = 0; i < kModuleNames.size(); ++i) {
    if (name != kModuleNames[i]) continue;
    module = static_cast<AdapterModule>(i);
    return true;
  }
  return false;
}

void check_adapter(const Adapter& adapter, const Plan& plan) {
  const AdapterSites sites(plan);
  std::set<std::pair<std::int32_t, AdapterModule>> seen;
  for (const LowRankUpdate& update : adapter.updates) {
    const std::string name = name_of(update);
    if (update.layer < 0 || update.layer >= sites.num_layers()) {
      fail(name, cat("a layer in [0, ", sites.num_layers(), ')'), update.layer);
    }
    const AdapterSite* site = sites.find(update.layer, update.module);
    if (site == nullptr) fail(name, "a module that this engine has", "one that it lacks");
    if (!seen.emplace(update.layer, update.module).second) fail(name, "one update", "two");
    const std::int64_t rank = update.rank;
    if (rank < 1 || rank > kMaxAdapterRank) fail(name, cat("a rank of 1 to ", kMaxAdapterRank), rank);
    if (update.in != site->k) fail(name + " A", shape(rank, site->k), shape(rank, update.in));
    if (update.out != site->n) fail(name + " B", shape(site->n, rank), shape(update.out, rank));
    check_matrix(name + " A", update.a, rank, site->k);
    check_matrix(name + " B", update.b, site->n, rank);
  }
}

}  // namespace aotllm
