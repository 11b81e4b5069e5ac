#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace aotllm {

/// Boundary on which an engine's tensors lie, so that they are used where they are mapped.
inline constexpr std::size_t kTensorAlignment = 64;
/// Tensors of this prefix fill the space between aligned tensors.
inline constexpr std::string_view kPadPrefix = "__pad.";

/// Element types that an engine holds.
enum class DType : std::uint8_t { kU8, kF32 };

/// A tensor of a mapped file.
struct Tensor {
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;
  std::span<const std::uint8_t> bytes;

  /// Elements of a float32 tensor; precondition: dtype == kF32.
  std::span<const float> floats() const;
};

/// The strict reading of a safetensors file (https://huggingface.co/docs/safetensors): no holes, no overlaps, and each
/// tensor but the fillers 64-byte aligned in the file.
class SafeTensors {
 public:
  /// `bytes` is the whole file, 64-byte aligned in memory, and outlives the result; `name` is the file's, for messages.
  /// Throws Error(kEngine) with file, tensor and reason.
  static SafeTensors parse(std::span<const std::uint8_t> bytes, const std::string& name);

  const std::string& name() const noexcept { return name_; }

  /// Throws Error(kEngine) where there is no such tensor.
  const Tensor& tensor(std::string_view tensor_name) const;
  /// Text of `__metadata__`; throws Error(kEngine) where it is missing.
  const std::string& metadata(std::string_view key) const;
  /// Likewise; empty where it is missing.
  std::string find_metadata(std::string_view key) const;

 private:
  std::string name_;
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace aotllm
