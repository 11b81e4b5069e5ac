#include "attention/copy_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "reference.h"

namespace aotllm::cuda {
namespace {

TEST(CopyBlocks, CopiesEachPairInEachLayerAndNothingElse) {
  AOTLLM_NEEDS_GPU();
  constexpr int kBlocks = 9;
  for (std::size_t block_bytes : {std::size_t{16}, std::size_t{4096}, std::size_t{40976}, std::size_t{262144}}) {
    const std::size_t stride = block_bytes + 48;
    std::vector<std::vector<std::uint8_t>> pools(3, std::vector<std::uint8_t>(stride * kBlocks));
    std::vector<DeviceArray<std::uint8_t>> layers;
    std::vector<std::uint8_t*> bases;
    for (auto& pool : pools) {
      for (auto& byte : pool) byte = static_cast<std::uint8_t>(random_engine()());
      layers.emplace_back(std::span<const std::uint8_t>(pool));
      bases.push_back(layers.back().data());
    }
    const std::vector<KvBlockCopy> copies = {{2, 7}, {-1, 3}, {8, 0}, {4, 4}, {2, 5}, {-1, -1}};
    const DeviceArray<std::uint8_t*> device_bases(bases);
    const DeviceArray<KvBlockCopy> device_copies(copies);
    CopyKvBlocksArgs args;
    args.layers = device_bases.data();
    args.num_layers = static_cast<int>(bases.size());
    args.block_stride = stride;
    args.block_bytes = block_bytes;
    args.copies = device_copies.data();
    args.num_copies = static_cast<int>(copies.size());
    copy_kv_blocks(args, Stream{});
    for (std::size_t layer = 0; layer < pools.size(); ++layer) {
      std::vector<std::uint8_t> want = pools[layer];
      for (const KvBlockCopy& copy : copies) {
        if (copy.from < 0) continue;
        std::copy_n(pools[layer].begin() + static_cast<std::ptrdiff_t>(copy.from * stride), block_bytes,
                    want.begin() + static_cast<std::ptrdiff_t>(copy.to * stride));
      }
      EXPECT_EQ(layers[layer].download(), want) << block_bytes << " bytes, layer " << layer;
    }
  }
}

}  // namespace
}  // namespace aotllm::cuda
