#include "runner/kv_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/plan.h"

namespace aotllm {
namespace {

/// Three layers in two groups, and one that another stage holds.
KvPlan mixed_plan() {
  KvPlan plan;
  plan.dtype = cpu::KvType::kI16;
  plan.tokens_per_block = 16;
  plan.layers = {{.num_kv_heads = 3, .head_dim = 64},
                 {.num_kv_heads = 1, .head_dim = 128, .window = 32, .group = 1},
                 {.num_kv_heads = 2, .head_dim = 64, .is_held = false},
                 {.num_kv_heads = 2, .head_dim = 32}};
  plan.groups = {{0, {0, 3}}, {32, {1}}};
  return plan;
}

/// Layers of equal shape, whose parts of a block are a power of two long.
KvPlan large_plan(int layers) {
  KvPlan plan;
  plan.dtype = cpu::KvType::kF32;
  plan.tokens_per_block = 16;
  plan.groups = {{0, {}}};
  for (int layer = 0; layer < layers; ++layer) {
    plan.layers.push_back({.num_kv_heads = 8, .head_dim = 64});
    plan.groups[0].layers.push_back(layer);
  }
  return plan;
}

TEST(KvMemory, PartsOfBlocksDoNotOverlap) {
  const KvPlan plan = mixed_plan();
  const BlockCounts counts{5, 3};
  const KvMemory memory(plan, counts);
  std::vector<std::pair<const std::uint8_t*, const std::uint8_t*>> parts;
  for (std::size_t group = 0; group < plan.groups.size(); ++group) {
    for (const int layer : plan.groups[group].layers) {
      const KvLayer& shape = plan.layers[layer];
      const std::int64_t bytes = plan.block_bytes(shape) / shape.num_kv_heads;
      for (BlockId block = 0; block < counts[group]; ++block) {
        const auto whole = memory.block(static_cast<int>(group), block);
        for (int head = 0; head < shape.num_kv_heads; ++head) {
          for (const std::uint8_t* begin : {memory.k(layer, block, head), memory.v(layer, block, head)}) {
            EXPECT_EQ(reinterpret_cast<std::uintptr_t>(begin) % 64, 0u);
            EXPECT_GE(begin, whole.data());
            EXPECT_LE(begin + bytes, whole.data() + whole.size());
            parts.emplace_back(begin, begin + bytes);
          }
        }
        EXPECT_EQ(memory.k(layer, block, 0) - memory.k(layer, 0, 0), block * memory.block_stride(layer));
        EXPECT_EQ(memory.v(layer, block, 0) - memory.v(layer, 0, 0), block * memory.block_stride(layer));
      }
    }
  }
  std::sort(parts.begin(), parts.end());
  for (std::size_t at = 1; at < parts.size(); ++at) EXPECT_LE(parts[at - 1].second, parts[at].first);
}

TEST(KvMemory, NeighboursAreNotALargePowerOfTwoApart) {
  for (const int layers : {1, 4, 30, 32}) {
    const KvMemory memory(large_plan(layers), BlockCounts{2});
    EXPECT_NE(memory.block_stride(0) % (16 << 10), 0) << layers << " layers";
    EXPECT_EQ(memory.block_stride(0) % 64, 0) << layers << " layers";
  }
}

TEST(KvMemory, BlocksThatAreNotUsedTakeNoMemory) {
  constexpr int kLayers = 32;
  constexpr BlockId kUsed = 3;
  constexpr std::int32_t kBlocks = 64;
  const KvMemory memory(large_plan(kLayers), BlockCounts{kBlocks});
  for (BlockId block = 0; block < kUsed; ++block) {
    for (int layer = 0; layer < kLayers; ++layer) {
      *memory.k(layer, block, 0) = 1;
      *memory.v(layer, block, 0) = 1;
    }
  }
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::uint8_t* const begin = memory.block(0, 0).data();
  const std::size_t bytes = static_cast<std::size_t>(kBlocks * memory.block_stride(0));
  std::vector<unsigned char> is_resident((bytes + page - 1) / page);
  ASSERT_EQ(::mincore(begin, bytes, is_resident.data()), 0);
  const auto resident = page * static_cast<std::size_t>(std::count_if(is_resident.begin(), is_resident.end(),
                                                                      [](unsigned char in) { return (in & 1) != 0; }));
  // At most a huge page more than what was written.
  EXPECT_LE(resident, static_cast<std::size_t>(kUsed * memory.block_stride(0)) + (std::size_t{2} << 20));
}

TEST(KvPool, CopiesWholeBlocksBetweenTiers) {
  const KvPlan plan = mixed_plan();
  KvPool pool(plan, {.device_blocks = {4, 2}, .host_blocks = {2, 1}});
  const auto fill = [&](BlockId block, std::uint8_t value) {
    for (const int layer : plan.groups[0].layers) {
      const auto bytes = static_cast<std::size_t>(plan.block_bytes(plan.layers[layer]));
      std::fill_n(pool.k(layer, block, 0), bytes, value);
      std::fill_n(pool.v(layer, block, 0), bytes, static_cast<std::uint8_t>(value + 1));
    }
  };
  for (BlockId block = 0; block < 4; ++block) fill(block, static_cast<std::uint8_t>(10 * (block + 1)));
  const std::vector<BlockCopy> copies = {{0, KvTier::kDevice, 1, KvTier::kHost, 0},
                                         {0, KvTier::kHost, 0, KvTier::kDevice, 3}};
  pool.copy_blocks(copies);
  const std::uint8_t expected[] = {10, 20, 30, 20};
  for (BlockId block = 0; block < 4; ++block) {
    for (const int layer : plan.groups[0].layers) {
      const auto bytes = static_cast<std::size_t>(plan.block_bytes(plan.layers[layer]));
      const auto is = [](std::uint8_t value) { return [value](std::uint8_t got) { return got == value; }; };
      EXPECT_TRUE(std::all_of(pool.k(layer, block, 0), pool.k(layer, block, 0) + bytes, is(expected[block])));
      EXPECT_TRUE(std::all_of(pool.v(layer, block, 0), pool.v(layer, block, 0) + bytes, is(expected[block] + 1)));
    }
  }
}

}  // namespace
}  // namespace aotllm
