#include <algorithm>
#include <functional>
#include <limits>
#include <set>

#include "aotllm/model_runner.h"
#include "engine/plan.h"

namespace aotllm {

void assign_kv_groups(KvPlan& kv, int max_seq_len) {
  constexpr int kAll = std::numeric_limits<int>::max();
  const auto reach = [&](const KvLayer& layer) {
    return layer.window == 0 || layer.window >= max_seq_len ? kAll : layer.window;
  };
  std::set<int, std::greater<>> reaches;
  for (const KvLayer& layer : kv.layers) reaches.insert(reach(layer));

  kv.groups.clear();
  for (const int r : reaches) {
    if (kv.groups.size() == kMaxKvGroups) break;
    kv.groups.push_back({r == kAll ? 0 : r, {}});
  }
  for (int i = 0; i < static_cast<int>(kv.layers.size()); ++i) {
    const auto rank = std::distance(reaches.begin(), reaches.find(reach(kv.layers[i])));
    kv.layers[i].group = std::min(static_cast<int>(rank), static_cast<int>(kv.groups.size()) - 1);
    if (kv.layers[i].is_held) kv.groups[kv.layers[i].group].layers.push_back(i);
  }
}

}  // namespace aotllm
