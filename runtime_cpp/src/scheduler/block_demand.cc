#include "scheduler/block_demand.h"

#include <algorithm>

#include "aotllm/kv_cache.h"

namespace aotllm {

BlockDemand::BlockDemand(const SchedulerConfig& config)
    : tokens_per_block_(config.tokens_per_block), num_groups_(static_cast<int>(config.windows.size())) {
  std::copy(config.windows.begin(), config.windows.end(), windows_.begin());
  const std::int32_t chunk = std::min(config.max_chunk_tokens, config.max_num_tokens);
  for (int group = 0; group < num_groups_; ++group) {
    if (has_window(group)) {
      // Positions that the tokens of a step are in or can see: window - 1 + chunk; one more block than they fill where
      // they start in the middle of one.
      const std::int32_t positions = windows_[static_cast<std::size_t>(group)] - 1 + chunk;
      window_blocks_[static_cast<std::size_t>(group)] = blocks_for(positions - 1) + 1;
    }
  }
}

/// Unsigned and of 32 bits: a step divides a thousand times.
std::int32_t BlockDemand::blocks_for(std::int32_t num_tokens) const {
  const auto size = static_cast<std::uint32_t>(tokens_per_block_);
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(num_tokens) + size - 1) / size);
}

std::int32_t BlockDemand::most_blocks(std::int32_t max_len, int group) const {
  const std::int32_t all = blocks_for(max_len);
  return has_window(group) ? std::min(all, window_blocks_[static_cast<std::size_t>(group)]) : all;
}

BlockDemand::WindowStep BlockDemand::window_step(const SequenceView& sequence, int group) const {
  const auto g = static_cast<std::size_t>(group);
  const auto first_visible = [&](std::int32_t num_computed) {
    return blocks_in_step(num_computed, num_computed + 1, windows_[g], tokens_per_block_).begin;
  };
  WindowStep step;
  step.end = blocks_for(sequence.num_computed);
  step.first_visible = first_visible(sequence.num_computed);
  const std::int32_t dropped = step.first_visible - (step.end - sequence.num_blocks[g]);
  step.not_freed = std::min(std::max(dropped, 0), sequence.num_shared[g]);
  if (sequence.num_uncertain > 0) {
    step.first_visible = first_visible(sequence.num_computed - sequence.num_uncertain);
  }
  return step;
}

std::int32_t BlockDemand::for_step(const SequenceView& sequence, std::int32_t num_tokens, int group) const {
  if (num_tokens == 0) {
    return 0;
  }
  const auto g = static_cast<std::size_t>(group);
  const std::int32_t held = sequence.num_blocks[g];
  const std::int32_t end = blocks_for(sequence.num_computed + num_tokens);
  if (!has_window(group)) {
    return std::max(end - held, 0);
  }
  const WindowStep step = window_step(sequence, group);
  const std::int32_t held_then = std::min(end - step.first_visible, window_blocks_[g]);
  return std::clamp(held_then - held + step.not_freed, 0, end - step.end);
}

std::int32_t BlockDemand::tokens_that_fit(const SequenceView& sequence, std::int32_t num_tokens,
                                          const BlockCounts& free_blocks) const {
  std::int64_t fitting = num_tokens;
  for (int group = 0; group < num_groups_; ++group) {
    const auto g = static_cast<std::size_t>(group);
    std::int64_t end = std::int64_t{free_blocks[g]} + sequence.num_blocks[g];  // of the blocks that may be covered
    if (has_window(group)) {
      const WindowStep step = window_step(sequence, group);
      const std::int64_t may_hold = end - step.not_freed;
      if (may_hold >= window_blocks_[g]) {
        continue;
      }
      end = std::max<std::int64_t>(may_hold + step.first_visible, free_blocks[g] + step.end);
    }
    fitting = std::min(fitting, end * tokens_per_block_ - sequence.num_computed);
  }
  return static_cast<std::int32_t>(std::max<std::int64_t>(fitting, 0));
}

std::int32_t BlockDemand::to_grow(const SequenceView& sequence, std::int32_t target, int group) const {
  const std::int32_t held = sequence.num_blocks[static_cast<std::size_t>(group)];
  if (!has_window(group)) {
    return std::max(blocks_for(target) - held, 0);
  }
  const std::int32_t more = blocks_for(target) - blocks_for(sequence.num_computed);
  return std::min(std::max(more, 0), window_blocks_[static_cast<std::size_t>(group)]);
}

std::int32_t most_tokens(const SchedulerConfig& config, const SequenceView& sequence) {
  std::int32_t limit = std::min(config.max_chunk_tokens, config.max_num_tokens);
  if (sequence.max_chunk > 0) {
    limit = std::min(limit, sequence.max_chunk);
  }
  if (sequence.is_context) {
    return std::min(limit, sequence.remaining());
  }
  // A step yields one token beyond the drafts that it accepts, so that more than this many cannot all be of use.
  const std::int32_t useful_drafts = std::max(sequence.max_len - sequence.num_tokens - 1, 0);
  return std::min(limit, sequence.remaining() + std::min(sequence.num_drafts, useful_drafts));
}

}  // namespace aotllm
