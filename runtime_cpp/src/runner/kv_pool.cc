#include "runner/kv_pool.h"

#include <cstring>
#include <new>

#include "aotllm/errors.h"
#include "support/free_memory.h"
#include "support/strings.h"

namespace aotllm {

KvPool::KvPool(const KvPlan& plan, std::int32_t num_blocks) : num_blocks_(num_blocks) {
  if (num_blocks < 1) {
    throw Error(ErrorKind::kInvalidRequest, cat("num_blocks: expected at least 1 KV block, got ", num_blocks),
                "num_blocks");
  }
  std::int64_t bytes = 0;
  bool overflow = false;
  for (const KvLayer& layer : plan.layers) {
    const std::int64_t stride = plan.block_bytes(layer);
    layers_.push_back({bytes, stride, stride / layer.num_kv_heads});
    std::int64_t layer_bytes = 0;
    overflow |= __builtin_mul_overflow(2 * stride, std::int64_t{num_blocks}, &layer_bytes);
    overflow |= __builtin_add_overflow(bytes, layer_bytes, &bytes);
  }
  // The kernel hands out pages that it does not have and kills the process that touches them: ask it beforehand.
  const std::int64_t available = free_memory().value_or(INT64_MAX);
  try {
    if (overflow || bytes > available) throw std::bad_alloc();
    memory_ = PageBuffer(static_cast<std::size_t>(bytes));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("no memory for ", num_blocks, " KV blocks (", overflow ? "more than 2^63" : std::to_string(bytes),
                    " bytes, ", available, " are free); ask for fewer blocks"),
                "num_blocks");
  }
}

void KvPool::copy_block(BlockId from, BlockId to) {
  if (from < 0 || from >= num_blocks_ || to < 0 || to >= num_blocks_) {
    throw Error(ErrorKind::kInternal,
                cat("copy_block: expected ids in [0, ", num_blocks_, "), got ", from, " and ", to));
  }
  if (from == to) return;
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    const auto bytes = static_cast<std::size_t>(block_stride(layer));
    std::memcpy(k(layer, to, 0), k(layer, from, 0), bytes);
    std::memcpy(v(layer, to, 0), v(layer, from, 0), bytes);
  }
}

}  // namespace aotllm
