#pragma once

#include <cstdint>

#include "aotllm/model_runner.h"
#include "aotllm/scheduler.h"

namespace aotllm {

/// How many blocks sequences need: arithmetic on lengths, windows and chunks, shared by all rules of the scheduler.
///
/// All figures are upper bounds that stay ones where a sequence turns out to have fewer tokens than its view says, down
/// to num_computed - num_uncertain: positions then end no later, and less has left its windows.
class BlockDemand {
 public:
  explicit BlockDemand(const SchedulerConfig& config);

  int num_groups() const { return num_groups_; }
  bool has_window(int group) const { return windows_[static_cast<std::size_t>(group)] > 0; }

  /// Blocks of `num_tokens` ≥ 0 positions from 0 on.
  std::int32_t blocks_for(std::int32_t num_tokens) const;

  /// Blocks of a group that a sequence of `max_len` tokens holds at most at a time, in chunks of the largest size.
  std::int32_t most_blocks(std::int32_t max_len, int group) const;

  /// Blocks that running `num_tokens` takes beyond those held; ≥ 0, for blocks that leave a window are counted only
  /// against new ones of the same sequence, and only if nobody else holds them.
  std::int32_t for_step(const SequenceView& sequence, std::int32_t num_tokens, int group) const;

  /// The most of `num_tokens` for which `for_step` ≤ `free_blocks` in all groups; 0 if there are none.
  std::int32_t tokens_that_fit(const SequenceView& sequence, std::int32_t num_tokens,
                               const BlockCounts& free_blocks) const;

  /// Blocks to take until `target` tokens are computed, where none that leaves a window becomes free.
  std::int32_t to_grow(const SequenceView& sequence, std::int32_t target, int group) const;

 private:
  /// The blocks of a group with a window when a sequence's table grows.
  struct WindowStep {
    std::int32_t end = 0;            ///< of the blocks held, at least
    std::int32_t first_visible = 0;  ///< those before it are given back
    std::int32_t not_freed = 0;      ///< of those given back, at most so many stay in use
  };
  WindowStep window_step(const SequenceView& sequence, int group) const;

  std::int32_t tokens_per_block_;
  int num_groups_;
  BlockCounts windows_{};
  BlockCounts window_blocks_{};  ///< most blocks of a group with a window, however long the sequence
};

/// The most tokens of `sequence` that one step may run: limits of the chunk, what remains, and drafts up to its end.
std::int32_t most_tokens(const SchedulerConfig& config, const SequenceView& sequence);

}  // namespace aotllm
