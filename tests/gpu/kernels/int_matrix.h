#pragma once

#include <random>
#include <vector>

#include "device_array.h"
#include "gemm/int_layout.h"
#include "reference.h"

namespace aotllm::cuda {

/// A random matrix of integers, on the device in blocks and here row by row. What pads it is poisoned as far as a
/// kernel may not look at it: scales of rows that do not exist are NaN.
class IntMatrix {
 public:
  IntMatrix(IntFormat format, int n, int k) : format_(format), n_(n), k_(k) {
    const bool four = int_has_four_bits(format);
    group_ = format == IntFormat::kInt8Row ? 0 : format == IntFormat::kInt4Group128 ? 128 : 32;
    int_shape({type(), n, k, nullptr, &kSome, reinterpret_cast<const std::uint8_t*>(&kSome), group_}, shape_);
    const int span = group_ == 0 ? k : group_;
    per_row_ = group_ == 0 ? 1 : shape_.k_blocks * kIntColumns / group_;
    codes_.resize(static_cast<std::size_t>(n) * k);
    scales_.resize(static_cast<std::size_t>(n) * per_row_);
    zeros_.resize(scales_.size());
    for (auto& code : codes_) code = static_cast<int>(random_engine()() >> 8 & (four ? 15u : 255u));
    std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
    const float unit = 1.0f / (std::sqrt(static_cast<float>(k)) * (four ? 5.0f : 80.0f));
    for (float& scale : scales_) scale = unit * uniform(random_engine());
    for (auto& zero : zeros_) {
      zero = group_ == 0 ? 128
                         : static_cast<int>(four ? random_engine()() >> 8 & 15u : 96 + (random_engine()() >> 8 & 63u));
    }
    values_.resize(codes_.size());
    for (int row = 0; row < n; ++row) {
      for (int column = 0; column < k; ++column) {
        const std::size_t at = static_cast<std::size_t>(row) * k + column;
        const std::size_t group = static_cast<std::size_t>(row) * per_row_ + column / span;
        values_[at] = scales_[group] * static_cast<float>(codes_[at] - zeros_[group]);
      }
    }
    store();
  }

  Weights weights() const { return {type(), n_, k_, code_data_.data(), scale_data_.data(), zero_data_.data(), group_}; }

  /// scale · (u − zero), rounded to float32 as a checkpoint's weights are: [k].
  const float* row(int row) const { return values_.data() + static_cast<std::size_t>(row) * k_; }

 private:
  static constexpr float kSome = 1.0f;
  WeightType type() const { return int_has_four_bits(format_) ? WeightType::kInt4 : WeightType::kInt8; }

  void store() {
    const bool four = int_has_four_bits(format_);
    const std::size_t block_bytes = static_cast<std::size_t>(int_block_bytes(format_));
    std::vector<std::uint8_t> bytes(shape_.blocks() * block_bytes);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random_engine()());
    for (int row = 0; row < n_; ++row) {
      for (int column = 0; column < k_; ++column) {
        const std::size_t block = static_cast<std::size_t>(row / kIntRows) * shape_.k_blocks + column / kIntColumns;
        const IntPlace place = int_place(four, row % kIntRows, column % kIntColumns);
        std::uint8_t& byte = bytes[block * block_bytes + place.byte];
        const int code = codes_[static_cast<std::size_t>(row) * k_ + column];
        if (four) {
          byte = static_cast<std::uint8_t>((byte & (0xF0 >> place.shift)) | code << place.shift);
        } else {
          byte = static_cast<std::uint8_t>(code - 128);
        }
      }
    }
    code_data_ = DeviceArray<std::uint8_t>(bytes);
    if (group_ == 0) {
      scale_data_ = DeviceArray<float>(scales_);
      return;
    }
    std::vector<float> scales(static_cast<std::size_t>(shape_.strips) * per_row_ * kIntRows, NAN);
    std::vector<std::uint8_t> zeros(scales.size(), 7);
    for (int row = 0; row < n_; ++row) {
      for (int group = 0; group < per_row_; ++group) {
        const std::size_t to =
            (static_cast<std::size_t>(row / kIntRows) * per_row_ + group) * kIntRows + row % kIntRows;
        scales[to] = scales_[static_cast<std::size_t>(row) * per_row_ + group];
        zeros[to] = static_cast<std::uint8_t>(zeros_[static_cast<std::size_t>(row) * per_row_ + group]);
      }
    }
    scale_data_ = DeviceArray<float>(scales);
    zero_data_ = DeviceArray<std::uint8_t>(zeros);
  }

  IntFormat format_;
  int n_, k_;
  int group_ = 0;
  int per_row_ = 0;  // scales of a row
  IntShape shape_;
  std::vector<int> codes_, zeros_;
  std::vector<float> scales_, values_;
  DeviceArray<std::uint8_t> code_data_, zero_data_;
  DeviceArray<float> scale_data_;
};

}  // namespace aotllm::cuda
