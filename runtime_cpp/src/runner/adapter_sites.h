#pragma once

#include <initializer_list>
#include <vector>

#include "aotllm/adapter.h"
#include "engine/plan.h"

namespace aotllm {

/// A module that adapters can update: rows [row_begin, row_begin + n) of a linear.
struct AdapterSite {
  int linear = -1;  ///< -1: the layer has no such module
  int group = -1;   ///< linears that read the same input are one group
  int row_begin = 0;
  int n = 0;
  int k = 0;
};

/// Finds the modules of every layer in a plan: `o` is the linear that reads what the attention wrote, `down` the one
/// that reads what the gated product wrote.
class AdapterSites {
 public:
  explicit AdapterSites(const Plan& plan);

  int num_layers() const noexcept { return static_cast<int>(sites_.size()) / kNumAdapterModules; }
  int num_groups() const noexcept { return num_groups_; }
  /// `layer` in [0, num_layers). nullptr where the plan has no such module, or shares its linear with another op, which
  /// the update would reach, too.
  const AdapterSite* find(int layer, AdapterModule module) const noexcept;
  /// The group of a linear; -1 where no adapter can reach it.
  int group_of(int linear) const noexcept { return groups_[linear]; }

 private:
  int add_group(std::initializer_list<int> linears);
  void add(int layer, AdapterModule module, int group, int linear, int row_begin, int n);

  const Plan& plan_;
  int num_groups_ = 0;
  std::vector<AdapterSite> sites_;  ///< [layer, module]
  std::vector<int> groups_;         ///< by linear
};

}  // namespace aotllm
