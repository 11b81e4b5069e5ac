#include "runner/cuda/kv_memory.h"

#include "aotllm/errors.h"
#include "runner/cuda/device.h"
#include "runner/kv_allocation.h"
#include "support/strings.h"

namespace aotllm::cuda {
namespace {

std::int32_t count(const KvAllocation& allocation, KvTier tier, int group) {
  return (tier == KvTier::kDevice ? allocation.device_blocks : allocation.host_blocks)[static_cast<std::size_t>(group)];
}

void refuse(std::int64_t bytes, std::int64_t free, const char* where) {
  throw Error(ErrorKind::kInvalidRequest,
              cat("num_blocks: the KV blocks ", where, " take ", bytes, " bytes, ", free, " are free; ask for fewer"),
              "num_blocks");
}

}  // namespace

KvBlocks::KvBlocks(const KvPlan& plan, const KvAllocation& allocation)
    : plan_(&plan), allocation_(checked_allocation(allocation, plan.groups.size())) {
  std::int64_t bytes[2] = {0, 0};
  for (const KvLayer& layer : plan.layers) {
    Layer& mine = layers_.emplace_back(Layer{layer.group, 2 * plan.block_bytes(layer)});
    for (const KvTier tier : {KvTier::kDevice, KvTier::kHost}) {
      std::int64_t& end = bytes[static_cast<int>(tier)];
      mine.offset[static_cast<int>(tier)] = end;
      std::int64_t size = 0;
      if (__builtin_mul_overflow(mine.block_bytes, std::int64_t{count(allocation_, tier, layer.group)}, &size) ||
          __builtin_add_overflow(end, (size + 255) / 256 * 256, &end)) {
        refuse(INT64_MAX, 0, "together");
      }
    }
  }
  if (const std::int64_t free = free_device_bytes(); bytes[0] > free) refuse(bytes[0], free, "on the device");
  device_ = DeviceArray<std::uint8_t>(static_cast<std::size_t>(bytes[0]));
  host_ = PinnedArray<std::uint8_t>(static_cast<std::size_t>(bytes[1]));
}

KvLayerView KvBlocks::layer(int layer) const {
  const KvLayer& shape = plan_->layers[static_cast<std::size_t>(layer)];
  const Layer& mine = layers_[static_cast<std::size_t>(layer)];
  KvLayerView view;
  view.type = plan_->device_dtype == DeviceKvType::kFp8 ? KvType::kFp8 : KvType::kBf16;
  view.base = device_.data() + mine.offset[0];
  view.block_stride = static_cast<std::size_t>(mine.block_bytes);
  view.num_blocks = count(allocation_, KvTier::kDevice, shape.group);
  view.num_kv_heads = shape.num_kv_heads;
  view.head_dim = shape.head_dim;
  view.tokens_per_block = plan_->tokens_per_block;
  return view;
}

void KvBlocks::copy(std::span<const BlockCopy> copies, cudaStream_t stream) const {
  for (const BlockCopy& copy : copies) check_block_copy(copy, allocation_, plan_->groups.size());
  for (const BlockCopy& copy : copies) {
    if (copy.from_tier != copy.to_tier || copy.from != copy.to) copy_one(copy, stream);
  }
}

/// Layers of equal size that follow each other are one copy: of rows as long as a block, a layer apart.
void KvBlocks::copy_one(const BlockCopy& copy, cudaStream_t stream) const {
  const auto at = [&](const Layer& layer, KvTier tier, BlockId block) {
    std::uint8_t* base = tier == KvTier::kDevice ? device_.data() : host_.data();
    return base + layer.offset[static_cast<int>(tier)] + block * layer.block_bytes;
  };
  const auto pitch = [](const Layer& a, const Layer& b, KvTier tier) {
    return b.offset[static_cast<int>(tier)] - a.offset[static_cast<int>(tier)];
  };
  const std::vector<int>& members = plan_->groups[static_cast<std::size_t>(copy.group)].layers;
  for (std::size_t i = 0; i < members.size();) {
    const Layer& first = layers_[static_cast<std::size_t>(members[i])];
    std::size_t rows = 1;
    std::int64_t from_pitch = first.block_bytes;
    std::int64_t to_pitch = first.block_bytes;
    for (; i + rows < members.size(); ++rows) {
      const Layer& last = layers_[static_cast<std::size_t>(members[i + rows - 1])];
      const Layer& next = layers_[static_cast<std::size_t>(members[i + rows])];
      const std::int64_t a = pitch(last, next, copy.from_tier);
      const std::int64_t b = pitch(last, next, copy.to_tier);
      if (next.block_bytes != first.block_bytes || (rows > 1 && (a != from_pitch || b != to_pitch))) break;
      from_pitch = a;
      to_pitch = b;
    }
    check(cudaMemcpy2DAsync(at(first, copy.to_tier, copy.to), static_cast<std::size_t>(to_pitch),
                            at(first, copy.from_tier, copy.from), static_cast<std::size_t>(from_pitch),
                            static_cast<std::size_t>(first.block_bytes), rows, cudaMemcpyDefault, stream),
          "copy of KV blocks");
    i += rows;
  }
}

}  // namespace aotllm::cuda
