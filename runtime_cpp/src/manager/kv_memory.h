#pragma once

#include <cstdint>
#include <optional>

#include "aotllm/gpt_manager.h"

namespace aotllm {

/// Divides the KV memory among the groups of layers.
///
/// The memory is counted in *units*: a block of the first group and its share of the others. A group with a window has
/// as many blocks for a unit as a sequence of full length holds in it for each block in the first group, but no less
/// than half: sequences shorter than the window hold as many in both.
class KvMemoryPlanner {
 public:
  /// `max_chunk_tokens` as in SchedulerConfig.
  KvMemoryPlanner(const ModelShape& shape, std::int32_t max_chunk_tokens);

  /// The division that `config` asks for; `free_bytes` as from free_memory(). Throws Error(kInvalidRequest) with the
  /// field's name where it asks for nothing sensible, in several ways, or for more than is free or 2^31 blocks.
  KvMemory plan(const ManagerConfig& config, std::int32_t max_batch_size, std::optional<std::int64_t> free_bytes) const;

 private:
  std::int64_t default_units(std::int32_t max_batch_size, std::optional<std::int64_t> free_bytes) const;
  std::int64_t units_for(const ManagerConfig& config, std::int32_t max_batch_size,
                         std::optional<std::int64_t> free_bytes) const;
  std::int64_t blocks_of(int group, std::int64_t units) const;
  std::int64_t bytes_of(std::int64_t units) const;
  std::int64_t units_in(std::int64_t bytes) const;
  std::int32_t sequence_blocks(int group, std::int32_t num_tokens) const;
  void check_free(const KvMemory& memory, const ManagerConfig& config, std::optional<std::int64_t> free_bytes) const;
  bool fits(const KvMemory& memory, std::int32_t num_tokens) const;

  const ModelShape& shape_;
  std::int32_t max_chunk_tokens_;
};

}  // namespace aotllm
