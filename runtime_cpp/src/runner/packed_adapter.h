#pragma once

#include <cstdint>
#include <vector>

#include "aotllm/adapter.h"
#include "kernels.h"
#include "runner/adapter_sites.h"
#include "support/page_buffer.h"

namespace aotllm {

/// An adapter in the form that steps read: the A of updates that read the same input lie below each other, each B is
/// packed in panels.
class PackedAdapter {
 public:
  /// The updates of one group of linears.
  struct Group {
    struct Part {
      int linear = 0;
      int row_begin = 0;   ///< of the module in the linear
      int first_rank = 0;  ///< of the part's rows in `a`
      cpu::Segment b;      ///< n = rows of the module, k = rank
    };

    int ranks = 0;             ///< of all parts; 0 = nothing to update
    int k = 0;                 ///< width of the input
    const float* a = nullptr;  ///< [ranks, k]
    std::vector<Part> parts;
  };

  /// Precondition: `check_adapter` accepts the adapter. Throws std::bad_alloc.
  PackedAdapter(const Adapter& adapter, const AdapterSites& sites);

  const Group& group(int index) const noexcept { return groups_[index]; }
  /// Most ranks of a group.
  int widest() const noexcept;
  std::int64_t bytes() const noexcept { return static_cast<std::int64_t>(memory_.size()); }

 private:
  PageBuffer memory_;
  std::vector<Group> groups_;
};

}  // namespace aotllm
