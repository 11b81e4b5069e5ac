#pragma once

#include <cstddef>
#include <cstdint>

#include "launch.h"

namespace aotllm::cuda {

/// A block to copy inside each layer's pool.
struct KvBlockCopy {
  std::int32_t from = -1;  ///< negative = padding: nothing is copied
  std::int32_t to = -1;
};

/// Blocks of one group of layers, which share their block numbers.
struct CopyKvBlocksArgs {
  std::uint8_t* const* layers = nullptr;  ///< device [num_layers]: KvLayerView::base of each, 16-byte aligned
  int num_layers = 0;
  std::size_t block_stride = 0;         ///< bytes from one block of a layer to the next, a multiple of 16
  std::size_t block_bytes = 0;          ///< of a layer's block (K and V of all KV heads), a multiple of 16
  const KvBlockCopy* copies = nullptr;  ///< device [num_copies]; read after the wait
  int num_copies = 0;
};

/// Copies blocks (copy-on-write of a shared prefix). No block may be the target of two copies, or target of one and
/// source of another: their order is not defined.
void copy_kv_blocks(const CopyKvBlocksArgs& args, const Stream& stream);

}  // namespace aotllm::cuda
