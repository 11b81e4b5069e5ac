#pragma once

#include <cstddef>
#include <cstdint>

namespace aotllm {

/// Zeroed anonymous memory, page-aligned; pages are taken on first touch, huge ones where the kernel grants them.
class PageBuffer {
 public:
  PageBuffer() = default;
  /// Throws std::bad_alloc where the address space cannot be had. Zero bytes hold nothing.
  explicit PageBuffer(std::size_t bytes);
  ~PageBuffer();

  PageBuffer(PageBuffer&& other) noexcept;
  PageBuffer& operator=(PageBuffer&& other) noexcept;

  std::uint8_t* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace aotllm
