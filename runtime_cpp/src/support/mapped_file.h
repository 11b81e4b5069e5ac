#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace aotllm {

/// A whole file, mapped read-only and shared with every other process that maps it. Unmapped on destruction.
class MappedFile {
 public:
  /// Maps a regular, non-empty file and asks the kernel to read ahead. Throws Error(kEngine) naming path and reason.
  explicit MappedFile(const std::string& path);
  ~MappedFile();

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  /// Reads what is not in memory and maps all pages at once, in place of one fault for every few of them when they are
  /// first touched. Where the kernel cannot, nothing happens.
  void populate() const noexcept;

  std::span<const std::uint8_t> bytes() const noexcept { return {data_, size_}; }

 private:
  const std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace aotllm
