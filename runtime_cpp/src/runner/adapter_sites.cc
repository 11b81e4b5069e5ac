#include "runner/adapter_sites.h"

#include <variant>

namespace aotllm {
namespace {

constexpr int kNone = -1;
constexpr int kShared = -2;  // of a linear that several ops use

}  // namespace

AdapterSites::AdapterSites(const Plan& plan)
    : plan_(plan), sites_(plan.kv.layers.size() * kNumAdapterModules), groups_(plan.linears.size(), kNone) {
  using enum AdapterModule;
  int layer = 0;
  int attention_out = kNone;
  int gated_out = kNone;
  for (const Op& op : plan.ops) {
    if (const auto* qkv = std::get_if<NormQkvRopeOp>(&op)) {
      layer = qkv->layer;
      const int q = qkv->heads.q_width();
      const int kv = qkv->heads.kv_width();
      const int group = add_group({qkv->linear});
      add(layer, kQ, group, qkv->linear, 0, q);
      add(layer, kK, group, qkv->linear, q, kv);
      add(layer, kV, group, qkv->linear, q + kv, kv);
    } else if (const auto* attention = std::get_if<PagedAttentionOp>(&op)) {
      layer = attention->layer;
      attention_out = attention->out;
    } else if (const auto* gated = std::get_if<NormSwigluOp>(&op)) {
      gated_out = gated->out;
      const int group = add_group({gated->gate, gated->up});
      add(layer, kGate, group, gated->gate, 0, plan.linears[gated->gate].n);
      add(layer, kUp, group, gated->up, 0, plan.linears[gated->up].n);
    } else if (const auto* linear = std::get_if<LinearResidualOp>(&op)) {
      const int group = add_group({linear->linear});
      const int n = plan.linears[linear->linear].n;
      if (linear->in == attention_out) add(layer, kO, group, linear->linear, 0, n);
      if (linear->in == gated_out) add(layer, kDown, group, linear->linear, 0, n);
      attention_out = gated_out = kNone;
    } else if (const auto* head = std::get_if<LmHeadOp>(&op)) {
      add_group({head->linear});
    }
  }
}

const AdapterSite* AdapterSites::find(int layer, AdapterModule module) const noexcept {
  const AdapterSite& site = sites_[layer * kNumAdapterModules + static_cast<int>(module)];
  return site.linear == kNone || groups_[site.linear] == kShared ? nullptr : &site;
}

int AdapterSites::add_group(std::initializer_list<int> linears) {
  for (const int linear : linears) groups_[linear] = groups_[linear] == kNone ? num_groups_ : kShared;
  return num_groups_++;
}

void AdapterSites::add(int layer, AdapterModule module, int group, int linear, int row_begin, int n) {
  sites_[layer * kNumAdapterModules + static_cast<int>(module)] = {linear, group, row_begin, n,
                                                                   plan_.linears[linear].k};
}

}  // namespace aotllm
