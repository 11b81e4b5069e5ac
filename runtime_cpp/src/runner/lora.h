#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "aotllm/adapter.h"
#include "aotllm/model_runner.h"
#include "kernels.h"
#include "runner/adapter_sites.h"
#include "runner/packed_adapter.h"
#include "runner/partition.h"
#include "support/page_buffer.h"

namespace aotllm {

/// Products of a linear that a thread has at hand: rows [row_begin, row_end) of the step, at most kTileRows, and rows
/// [column, column + width) of the linear.
struct OutputBlock {
  int row_begin = 0;
  int row_end = 0;
  int column = 0;
  int width = 0;
  float* y = nullptr;  ///< of row_begin and column
  std::ptrdiff_t y_stride = 0;
};

/// The loaded adapters, and which rows of the running step have one.
///
/// The update of a row, y += B · (A · x), is made of sums whose order depends on `k` and the rank only. Rows without an
/// adapter are never touched.
class Lora {
 public:
  explicit Lora(const Plan& plan);

  /// As `ModelRunner::load_adapter` and `unload_adapter`.
  void load(AdapterId id, const Adapter& adapter);
  void unload(AdapterId id);
  /// Bytes of the loaded adapters and of the memory that steps need for them.
  std::int64_t bytes() const noexcept;

  /// Takes over the adapters of a step whose rows are the sequences' tokens in order. Throws Error(kInternal) for an id
  /// that is not loaded. Allocates nothing.
  void assign(std::span<const SequenceStep> sequences);

  /// Some row of the step has an update of `linear`, or of one that reads the same input.
  bool updates(int linear) const noexcept;

  /// A · x of those of `rows` that have an update in the group of `linear`: part `index` of `count` equal parts. `a.x`
  /// holds the linear's input, from row 0 of the step on.
  void shrink(const cpu::Kernels& kernels, int linear, const cpu::Activations& a, Range rows, int index,
              int count) const;

  /// Adds B · (A · x) to the products in `block`. Needs `shrink` done for these rows.
  void expand(const cpu::Kernels& kernels, int linear, const OutputBlock& block) const;

 private:
  /// Rows of neighbouring sequences that have the same adapter.
  struct Run {
    int row_begin = 0;
    int row_end = 0;
    const PackedAdapter* adapter = nullptr;
  };

  float* products_of(std::ptrdiff_t row) const noexcept {
    return reinterpret_cast<float*>(products_.data()) + row * stride_;
  }
  void add_part(const cpu::Kernels& kernels, const PackedAdapter::Group::Part& part, const OutputBlock& block) const;

  const Plan& plan_;
  AdapterSites sites_;
  std::map<AdapterId, std::unique_ptr<const PackedAdapter>> adapters_;
  PageBuffer products_;        ///< [max_num_tokens, stride_]: A · x
  std::ptrdiff_t stride_ = 0;  ///< ranks of the widest group of any loaded adapter
  std::vector<Run> runs_;      ///< of the step, ascending
};

}  // namespace aotllm
