#pragma once

#include <cstddef>
#include <cstdint>

namespace aotllm::cuda {

enum class KvType : std::uint8_t {
  kBf16,
  kFp8,  ///< E4M3 of the value itself: keys and values of trained models lie well within ±448
};

constexpr std::size_t element_bytes(KvType type) {
  return type == KvType::kBf16 ? 2 : 1;
}

/// The paged cache of one layer, with the block tables of a step.
///
/// Block b is at base + b · block_stride and holds K, then V, each [num_kv_heads][tokens_per_block][head_dim]: what a
/// KV head keeps of a block is one contiguous piece of tokens_per_block rows.
struct KvLayerView {
  KvType type = KvType::kBf16;
  std::uint8_t* base = nullptr;  ///< device, 256-byte aligned
  std::size_t block_stride = 0;  ///< bytes
  int num_blocks = 0;            ///< of the pool; for tensor maps
  int num_kv_heads = 0;
  int head_dim = 0;
  int tokens_per_block = 0;  ///< 16, 32, 64 or 128
  const std::int32_t* block_table =
      nullptr;  ///< device [sequences, table_stride]; entry i: positions from i · tokens_per_block
  int table_stride = 0;
};

}  // namespace aotllm::cuda
