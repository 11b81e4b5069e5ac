#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "device_array.h"
#include "engine/plan.h"
#include "gemm/gemm.h"

namespace aotllm::cuda {

WeightType weight_type(MatrixFormat format);

/// All tensors that a plan names, on the device, each aligned to 256 bytes.
class WeightStore {
 public:
  /// Copies them from the mapped file, several chunks at a time. Throws Error(kEngineIncompatible) where the device has
  /// too little memory for them and the plan's arena.
  explicit WeightStore(const Plan& plan);

  /// Where a tensor of the plan lies; null for an empty one.
  const void* find(const void* mapped) const;
  template <class T>
  const T* find(std::span<const T> mapped) const {
    return mapped.empty() ? nullptr : static_cast<const T*>(find(static_cast<const void*>(mapped.data())));
  }
  /// A linear's weights, wherever they lie.
  Weights matrix(const Linear& linear) const;
  std::size_t bytes() const noexcept { return memory_.size(); }

 private:
  struct Piece {
    const std::uint8_t* from = nullptr;
    std::size_t bytes = 0;
    std::size_t offset = 0;
  };

  void add(std::span<const std::uint8_t> bytes);
  void add(std::span<const float> values);
  void collect(const Plan& plan);
  void copy_chunks(const std::vector<Piece>& chunks) const;

  std::map<const void*, Piece> pieces_;
  std::size_t size_ = 0;
  DeviceArray<std::uint8_t> memory_;
};

}  // namespace aotllm::cuda
