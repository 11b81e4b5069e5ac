#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "engine/plan.h"
#include "gemm/layer_gemms.h"
#include "runner/cuda/step_data.h"
#include "runner/cuda/weight_store.h"

// What a chain of products (gemm/layer_gemms.h) does of a layer in steps of few decode rows: everything between two
// attentions.
namespace aotllm::cuda {

/// Ops [begin, end()) of a plan: attention's output projection, gate and up, down and, where it fits, the next layer's
/// norm_qkv_rope, whose rotation is left. Op begin - 1 is the attention.
struct LayerOps {
  std::size_t begin = 0;
  bool has_qkv = false;

  std::size_t end() const noexcept { return begin + (has_qkv ? 4 : 3); }
  friend bool operator==(const LayerOps&, const LayerOps&) = default;
};

/// The layers of a plan that such a chain can run, as far as ops, buffers and formats tell; by `begin`, apart from each
/// other. None where results must not depend on the number of rows, nor where products are summed over ranks.
std::vector<LayerOps> find_layer_ops(const Plan& plan, bool deterministic);

/// Layers of a plan bound to the kernels of their chains.
class LayerChains {
 public:
  struct Chain {
    LayerOps ops;
    std::array<std::unique_ptr<LayerGemms>, 2> gemms;  ///< for up to 8 and up to 16 rows
  };

  LayerChains() = default;
  /// `arena` is where the plan's buffers lie, `qkv` [plan.device_rows(), n] where products of Q, K and V go. Layers
  /// that no kernel of this device takes are left out.
  LayerChains(const Plan& plan, const WeightStore& weights, bool deterministic, std::uint8_t* arena, __nv_bfloat16* qkv,
              Workspace workspace);

  /// The one that begins with op `index` and runs in a step of `shape`; null where that op is run as any other.
  const Chain* find(std::size_t index, const StepShape& shape) const;
  /// Where op `index` leaves its rows in place of its output, for the chain behind it; none where there is no such.
  GroupCodes codes_after(std::size_t index, const StepShape& shape) const;
  void launch(const Chain& chain, int rows, const Stream& stream) const;

 private:
  std::unique_ptr<LayerScratch> scratch_;  ///< of all of them, which run one after the other
  std::map<std::size_t, Chain> chains_;    ///< by the first op
};

}  // namespace aotllm::cuda
