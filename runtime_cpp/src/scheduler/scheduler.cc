#include "aotllm/scheduler.h"

#include <algorithm>
#include <string>

#include "aotllm/errors.h"

namespace aotllm {

bool ranks_before(const SequenceView& a, const SequenceView& b) noexcept {
  return a.priority != b.priority ? a.priority > b.priority : a.id < b.id;
}

Scheduler::Scheduler(const SchedulerConfig& config) : config_(config) {
  if (std::min({config.max_batch_size, config.max_num_tokens, config.max_chunk_tokens, config.tokens_per_block}) < 1) {
    throw Error(ErrorKind::kInternal, "every limit of the scheduler must be ≥ 1");
  }
}

StepPlan Scheduler::plan(const Snapshot& snapshot) const {
  StepPlan plan;
  std::vector<std::int32_t> tokens = share_budget(snapshot.running);
  find_blocks(snapshot, tokens, plan);
  std::int32_t budget = config_.max_num_tokens;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] > 0) {
      plan.sequences.push_back({snapshot.running[i].id, tokens[i]});
      budget -= tokens[i];
    }
  }
  admit(snapshot, budget, plan);
  return plan;
}

std::int32_t Scheduler::blocks_for(std::int32_t num_tokens) const {
  return (num_tokens + config_.tokens_per_block - 1) / config_.tokens_per_block;
}

/// Blocks of what is known and of one block's worth of growth, unless the sequence ends before. No less than it holds.
std::int32_t Scheduler::reserved_blocks(const SequenceView& sequence) const {
  return blocks_for(std::min(sequence.num_tokens + config_.tokens_per_block, sequence.max_len));
}

/// Tokens for each running sequence, as far as the budget goes and regardless of memory.
std::vector<std::int32_t> Scheduler::share_budget(const std::vector<SequenceView>& running) const {
  std::vector<std::int32_t> tokens(running.size(), 0);
  std::int32_t budget = config_.max_num_tokens;
  for (std::size_t i = 0; i < running.size() && budget > 0; ++i) {
    if (i == 0 || running[i].remaining() == 1) {  // the first in rank always advances
      tokens[i] = 1;
      --budget;
    }
  }
  for (std::size_t i = 0; i < running.size() && budget > 0; ++i) {
    if (running[i].remaining() > 1) {
      const std::int32_t chunk = std::min(running[i].remaining(), config_.max_chunk_tokens);
      const std::int32_t extra = std::min(chunk - tokens[i], budget);
      tokens[i] += extra;
      budget -= extra;
    }
  }
  return tokens;
}

/// Finds blocks for `tokens` in rank order. Where they do not suffice, preempts from the end of the ranks, then lowers
/// `tokens` to what fits.
void Scheduler::find_blocks(const Snapshot& snapshot, std::vector<std::int32_t>& tokens, StepPlan& plan) const {
  const std::vector<SequenceView>& running = snapshot.running;
  std::int32_t free_blocks = snapshot.free_blocks;
  std::size_t end = running.size();  // those from here on are preempted
  for (std::size_t i = 0; i < end; ++i) {
    const SequenceView& sequence = running[i];
    while (blocks_for(sequence.num_computed + tokens[i]) - sequence.num_blocks > free_blocks && end > i + 1) {
      --end;
      tokens[end] = 0;
      free_blocks += running[end].num_blocks;
      plan.preempted.push_back(running[end].id);
    }
    const std::int64_t covered = std::int64_t{sequence.num_blocks + free_blocks} * config_.tokens_per_block;
    tokens[i] = static_cast<std::int32_t>(std::min<std::int64_t>(tokens[i], covered - sequence.num_computed));
    free_blocks -= std::max(blocks_for(sequence.num_computed + tokens[i]) - sequence.num_blocks, 0);
  }
}

/// Admits waiting sequences. None in a step that preempts: there, not even this step's needs were free, so that the
/// blocks left beside all reservations are below zero.
void Scheduler::admit(const Snapshot& snapshot, std::int32_t budget, StepPlan& plan) const {
  std::int64_t unreserved = snapshot.free_blocks;
  for (const SequenceView& sequence : snapshot.running) {
    unreserved -= reserved_blocks(sequence) - sequence.num_blocks;
  }
  std::size_t batch_size = snapshot.running.size();
  for (const SequenceView& sequence : snapshot.waiting) {
    const std::int32_t need = reserved_blocks(sequence);
    if (batch_size >= static_cast<std::size_t>(config_.max_batch_size) || budget == 0 || need > unreserved) {
      break;
    }
    const std::int32_t chunk = std::min({sequence.remaining(), config_.max_chunk_tokens, budget});
    plan.admitted.push_back(sequence.id);
    plan.sequences.push_back({sequence.id, chunk});
    unreserved -= need;
    budget -= chunk;
    ++batch_size;
  }
}

}  // namespace aotllm
