#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"
#include "attention/kv_layout.h"
#include "device_array.h"
#include "engine/plan.h"
#include "runner/cuda/pinned.h"

namespace aotllm::cuda {

/// The KV blocks of a rank: on the device, and page-locked on the host. In both, layer follows layer, and in each block
/// follows block, so that a block of a group of equal layers is one strided copy.
class KvBlocks {
 public:
  KvBlocks() = default;
  /// Throws Error(kInvalidRequest) for numbers of blocks out of range or for which there is no memory.
  KvBlocks(const KvPlan& plan, const KvAllocation& allocation);

  const KvAllocation& allocation() const noexcept { return allocation_; }

  /// The cache of a layer, without its block table.
  KvLayerView layer(int layer) const;

  /// Copies blocks in order, on `stream`. Throws Error(kInternal) for an id that is out of range, before any is copied.
  void copy(std::span<const BlockCopy> copies, cudaStream_t stream) const;

 private:
  struct Layer {
    int group = 0;
    std::int64_t block_bytes = 0;     ///< K and V
    std::int64_t offset[2] = {0, 0};  ///< of the layer in its tier's memory
  };

  void copy_one(const BlockCopy& copy, cudaStream_t stream) const;

  const KvPlan* plan_ = nullptr;
  KvAllocation allocation_;
  std::vector<Layer> layers_;
  DeviceArray<std::uint8_t> device_;
  PinnedArray<std::uint8_t> host_;
};

}  // namespace aotllm::cuda
