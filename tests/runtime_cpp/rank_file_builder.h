#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace aotllm::testing_support {

inline std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

/// The bytes of a safetensors file with this header text and data. The header is padded so that data starts on 64
/// bytes.
inline std::vector<std::uint8_t> file_bytes(std::string header, const std::vector<std::uint8_t>& data) {
  while ((8 + header.size()) % 64 != 0) header += ' ';
  const std::uint64_t length = header.size();
  std::vector<std::uint8_t> file(8 + header.size() + data.size());
  std::memcpy(file.data(), &length, 8);
  std::copy(header.begin(), header.end(), file.begin() + 8);
  std::copy(data.begin(), data.end(), file.begin() + 8 + static_cast<std::ptrdiff_t>(header.size()));
  return file;
}

/// Writes rank files as the engine builder does: tensors on 64-byte boundaries, `__pad.N` between.
class RankFileBuilder {
 public:
  void add_floats(const std::string& name, const std::vector<float>& values) {
    add(name, "F32", std::to_string(values.size()), values.data(), values.size() * sizeof(float));
  }
  /// [rows, values.size() / rows]
  void add_rows(const std::string& name, std::size_t rows, const std::vector<float>& values) {
    add(name, "F32", std::to_string(rows) + "," + std::to_string(values.size() / rows), values.data(),
        values.size() * sizeof(float));
  }
  void add_bytes(const std::string& name, const std::vector<std::uint8_t>& bytes) {
    add(name, "U8", std::to_string(bytes.size()), bytes.data(), bytes.size());
  }

  std::vector<std::uint8_t> build(std::string_view plan) const {
    return file_bytes("{\"__metadata__\":{\"plan\":" + json_string(plan) + "}" + records_ + "}", data_);
  }

 private:
  void add(const std::string& name, const char* dtype, const std::string& shape, const void* bytes, std::size_t size) {
    const auto* begin = static_cast<const std::uint8_t*>(bytes);
    record(name, dtype, shape, size);
    data_.insert(data_.end(), begin, begin + size);
    if (const std::size_t rest = (64 - size % 64) % 64; rest != 0) {
      record("__pad." + std::to_string(pads_++), "U8", std::to_string(rest), rest);
      data_.resize(data_.size() + rest);
    }
  }

  void record(const std::string& name, const char* dtype, const std::string& shape, std::size_t size) {
    records_ += "," + json_string(name) + ":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
                std::to_string(data_.size()) + "," + std::to_string(data_.size() + size) + "]}";
  }

  std::string records_;
  std::vector<std::uint8_t> data_;
  int pads_ = 0;
};

}  // namespace aotllm::testing_support
