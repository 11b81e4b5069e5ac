#include "support/page_buffer.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace aotllm {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

PageBuffer::PageBuffer(std::size_t bytes) {
  if (bytes == 0) return;
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  if (bytes >= kHugePage) ::madvise(data, bytes, MADV_HUGEPAGE);  // a hint only
  data_ = static_cast<std::uint8_t*>(data);
  size_ = bytes;
}

PageBuffer::~PageBuffer() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

PageBuffer::PageBuffer(PageBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

PageBuffer& PageBuffer::operator=(PageBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace aotllm
