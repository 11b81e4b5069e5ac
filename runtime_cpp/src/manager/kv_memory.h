#pragma once

#include <cstdint>
#include <optional>

#include "aotllm/gpt_manager.h"
#include "aotllm/scheduler.h"

namespace aotllm {

/// Divides the KV memory among the groups of layers.
///
/// The memory is counted in *units*: a block of the first group and its share of the others. A group with a window has
/// as many blocks for a unit as a sequence of full length holds in it for each block in the first group, but no less
/// than half: sequences shorter than the window hold as many in both.
class KvMemoryPlanner {
 public:
  /// `scheduler` has the windows of `shape`, and the chunks that sequences will come in.
  KvMemoryPlanner(const ModelShape& shape, const SchedulerConfig& scheduler);

  /// The division that `config` asks for; `free` as the runner says. Throws Error(kInvalidRequest) with the
  /// field's name where it asks for nothing sensible, in several ways, or for more than is free or 2^31 blocks.
  KvMemory plan(const ManagerConfig& config, std::int32_t max_batch_size, const FreeMemory& free) const;

 private:
  std::int64_t default_units(std::int32_t max_batch_size, const FreeMemory& free) const;
  std::int64_t units_for(const ManagerConfig& config, std::int32_t max_batch_size, const FreeMemory& free) const;
  std::int64_t blocks_of(int group, std::int64_t units) const;
  std::int64_t bytes_of(std::int64_t units) const;
  std::int64_t units_in(std::int64_t bytes) const;
  void check_free(const KvMemory& memory, const ManagerConfig& config, const FreeMemory& free) const;
  bool fits(const KvMemory& memory, std::int32_t num_tokens) const;

  const ModelShape& shape_;
  const Scheduler scheduler_;  ///< knows what a sequence holds at most
};

}  // namespace aotllm
