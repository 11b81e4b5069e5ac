#include "elementwise/mapped_copy.h"

#include <numeric>

#include "elementwise_check.h"
#include "runner/cuda/pinned.h"

namespace aotllm::cuda {
namespace {

/// Sizes about those of vectors, blocks and of what goes to the copy engine.
TEST(MappedCopy, BothWaysAndNotAWordMore) {
  AOTLLM_NEEDS_GPU();
  for (const std::size_t words : {1, 3, 4, 5, 511, 512, 513, 4099, 16383, 16384, 16385, 100001}) {
    PinnedArray<std::uint32_t> host(words + 8);
    std::iota(host.data(), host.data() + words + 8, static_cast<std::uint32_t>(words));
    DeviceArray<std::uint32_t> device(words + 8);
    device.fill(0xFF);
    copy_mapped(device.data(), host.device(), 4 * words, nullptr);
    const std::vector<std::uint32_t> got = device.download();
    for (std::size_t i = 0; i < words + 8; ++i) {
      ASSERT_EQ(got[i], i < words ? words + i : 0xFFFFFFFFu) << words << " words, " << i;
    }
    std::fill_n(host.data(), words + 8, 7u);
    copy_mapped(host.device(), device.data(), 4 * words, nullptr);
    check(cudaDeviceSynchronize(), "copies");
    for (std::size_t i = 0; i < words + 8; ++i) {
      ASSERT_EQ(host.data()[i], i < words ? words + i : 7u) << words << " words, " << i;
    }
  }
}

}  // namespace
}  // namespace aotllm::cuda
