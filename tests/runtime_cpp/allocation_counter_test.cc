#include "allocation_counter.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

namespace {

std::atomic<std::uint64_t> allocations{0};

}  // namespace

// Replaces the global operators for all tests of this binary; the aligned forms are left alone.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size == 0 ? 1 : size);
}
void* operator new(std::size_t size) {
  if (void* p = operator new(size, std::nothrow)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p, const std::nothrow_t&) noexcept {
  std::free(p);
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}

namespace aotllm::testing_support {

std::uint64_t allocation_count() noexcept {
  return allocations.load(std::memory_order_relaxed);
}

TEST(AllocationCounter, Counts) {
  const auto before = allocation_count();
  std::vector<int> values(100);
  values[0] = 1;
  EXPECT_GT(allocation_count(), before) << values[0];
}

}  // namespace aotllm::testing_support
