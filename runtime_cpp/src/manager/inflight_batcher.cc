#include "manager/inflight_batcher.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "aotllm/errors.h"

namespace aotllm {

InflightBatcher::InflightBatcher(ModelRunner& runner, const Limits& limits)
    : runner_(runner),
      limits_(limits),
      scheduler_(limits.scheduler),
      kv_(limits.num_kv_blocks, limits.scheduler.tokens_per_block),
      sampler_(limits.vocab_size) {
  step_.reserve(static_cast<std::size_t>(limits.scheduler.max_batch_size));
}

void InflightBatcher::add(std::unique_ptr<Sequence> sequence) {
  Sequence* added = sequence.get();
  sequences_.emplace(added->id, std::move(sequence));
  waiting_.insert(added);
}

void InflightBatcher::cancel(RequestId id) {
  const auto found = sequences_.find(id);
  if (found != sequences_.end()) {
    Response response = response_for(*found->second);
    response.finish_reason = FinishReason::kCancelled;
    finish(*found->second, std::move(response));
  }
}

void InflightBatcher::cancel_all() {
  while (!sequences_.empty()) {
    cancel(sequences_.begin()->first);
  }
}

void InflightBatcher::fail_all(const std::string& message) {
  plan_ = {};
  while (!sequences_.empty()) {
    fail(*sequences_.begin()->second, ErrorKind::kInternal, message);
  }
}

void InflightBatcher::plan() {
  const Snapshot before = snapshot();
  plan_ = scheduler_.plan(before);
#ifndef NDEBUG
  scheduler_.check_invariants(before, plan_);
#endif
  for (const RequestId id : plan_.preempted) {
    preempt(id);
  }
  for (const RequestId id : plan_.admitted) {
    admit(id);
  }
  for (const ScheduledSequence& scheduled : plan_.sequences) {
    Sequence& sequence = *sequences_.at(scheduled.id);
    kv_.grow(sequence.table, sequence.num_computed + scheduled.num_tokens);
  }
  saturated_ = !waiting_.empty();
}

void InflightBatcher::run() {
  if (plan_.sequences.empty() || !run_step()) {
    return;
  }
  const auto vocab_size = static_cast<std::size_t>(limits_.vocab_size);
  const std::span<const float> logits = outputs_.logits;
  std::size_t row = 0;
  for (const ScheduledSequence& scheduled : plan_.sequences) {
    Sequence& sequence = *sequences_.at(scheduled.id);
    sequence.num_computed += scheduled.num_tokens;
    totals_.context_tokens += sequence.state == SequenceState::kContext ? scheduled.num_tokens : 0;
    if (static_cast<std::size_t>(sequence.num_computed) == sequence.tokens.size()) {
      sample(sequence, logits.subspan(row * vocab_size, vocab_size));
      ++row;
    }
  }
  plan_ = {};
}

std::vector<Response> InflightBatcher::take_responses() {
  return std::exchange(responses_, {});
}

/// Gives the planned step to the runner. False where it failed, and its sequences with it.
bool InflightBatcher::run_step() {
  step_.clear();
  std::size_t rows = 0;
  for (const ScheduledSequence& scheduled : plan_.sequences) {
    const Sequence& sequence = *sequences_.at(scheduled.id);
    const auto start = static_cast<std::size_t>(sequence.num_computed);
    const auto count = static_cast<std::size_t>(scheduled.num_tokens);
    const bool is_last_chunk = start + count == sequence.tokens.size();
    step_.push_back({.tokens = std::span(sequence.tokens).subspan(start, count),
                     .start_position = sequence.num_computed,
                     .block_table = sequence.table.blocks(),
                     .logits = is_last_chunk ? LogitsMode::kLast : LogitsMode::kNone});
    rows += is_last_chunk ? 1 : 0;
  }
  ++totals_.steps;
  try {
    runner_.step(step_, outputs_);
  } catch (const std::exception& e) {
    fail_step(std::string("the step failed: ") + e.what());
    return false;
  } catch (...) {
    fail_step("the step failed");
    return false;
  }
  if (outputs_.logits.size() != rows * static_cast<std::size_t>(limits_.vocab_size)) {
    fail_step("the step returned " + std::to_string(outputs_.logits.size()) + " logits for " + std::to_string(rows) +
              " rows of " + std::to_string(limits_.vocab_size));
    return false;
  }
  return true;
}

/// Appends the token that `logits` [vocab_size] give and ends the sequence if that was its last.
void InflightBatcher::sample(Sequence& sequence, std::span<const float> logits) {
  if (sequence.state == SequenceState::kContext) {
    sequence.move_to(SequenceState::kGenerating);
  }
  Response response = response_for(sequence);
  TokenId token = 0;
  try {
    token = sampler_.sample(logits, {.params = sequence.sampling,
                                     .processors = sequence.processors,
                                     .tokens = sequence.tokens,
                                     .num_prompt_tokens = sequence.num_prompt_tokens,
                                     .seed = sequence.seed});
    if (sequence.num_logprobs >= 0) {
      response.logprobs.push_back(sampler_.logprobs(logits, token, sequence.num_logprobs));
    }
    if (sequence.return_logits) {
      response.logits.emplace_back(logits.begin(), logits.end());
    }
    response.token_ids.push_back(token);
    sequence.tokens.push_back(token);
  } catch (const Error& e) {
    return fail(sequence, e.kind(), std::string("sampling failed: ") + e.what());
  } catch (const std::exception& e) {
    return fail(sequence, ErrorKind::kInternal, std::string("sampling failed: ") + e.what());
  }
  ++totals_.generated_tokens;
  if (is_stop_token(sequence, token)) {
    response.finish_reason = FinishReason::kStop;
    response.stop_token_id = token;
  } else if (sequence.tokens.size() >= static_cast<std::size_t>(sequence.max_len)) {
    response.finish_reason = FinishReason::kLength;
  }
  if (response.finish_reason) {
    finish(sequence, std::move(response));
  } else {
    responses_.push_back(std::move(response));
  }
}

bool InflightBatcher::is_stop_token(const Sequence& sequence, TokenId token) const {
  const auto contains = [token](const std::vector<TokenId>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  return contains(sequence.sampling.stop_token_ids) ||
         (!sequence.sampling.ignore_eos && contains(limits_.eos_token_ids));
}

/// Frees what the sequence holds, sends `response` as its last one and forgets it.
void InflightBatcher::finish(Sequence& sequence, Response response) {
  const RequestId id = sequence.id;
  (sequence.state == SequenceState::kQueued ? waiting_ : running_).erase(&sequence);
  sequence.move_to(SequenceState::kFinished);
  release_blocks(sequence);
  ++totals_.finished;
  responses_.push_back(std::move(response));
  sequences_.erase(id);
}

void InflightBatcher::fail(Sequence& sequence, ErrorKind kind, const std::string& message) {
  Response response = response_for(sequence);
  response.finish_reason = FinishReason::kError;
  response.error_kind = kind;
  response.error_message = message;
  finish(sequence, std::move(response));
}

void InflightBatcher::fail_step(const std::string& message) {
  for (const ScheduledSequence& scheduled : plan_.sequences) {
    fail(*sequences_.at(scheduled.id), ErrorKind::kInternal, message);
  }
  plan_ = {};
}

Response InflightBatcher::response_for(const Sequence& sequence) const {
  Response response;
  response.request_id = sequence.id;
  response.num_prompt_tokens = sequence.num_prompt_tokens;
  response.num_cached_tokens = std::max(sequence.num_cached, 0);
  return response;
}

void InflightBatcher::release_blocks(Sequence& sequence) {
  kv_.release(sequence.table, std::span(sequence.tokens).first(static_cast<std::size_t>(sequence.num_computed)));
  sequence.num_computed = 0;
}

void InflightBatcher::preempt(RequestId id) {
  Sequence& sequence = *sequences_.at(id);
  running_.erase(&sequence);
  sequence.move_to(SequenceState::kQueued);
  release_blocks(sequence);
  waiting_.insert(&sequence);
  ++totals_.preemptions;
}

void InflightBatcher::admit(RequestId id) {
  Sequence& sequence = *sequences_.at(id);
  waiting_.erase(&sequence);
  sequence.move_to(SequenceState::kContext);
  sequence.num_computed = kv_.acquire(sequence.table, sequence.tokens);
  if (sequence.num_cached < 0) {
    sequence.num_cached = sequence.num_computed;
  }
  running_.insert(&sequence);
}

Snapshot InflightBatcher::snapshot() const {
  Snapshot snapshot;
  snapshot.free_blocks = kv_.num_free();
  snapshot.running.reserve(running_.size());
  for (const Sequence* sequence : running_) {
    snapshot.running.push_back(sequence->view());
  }
  const auto max_admitted = static_cast<std::size_t>(limits_.scheduler.max_batch_size);
  for (auto it = waiting_.begin(); it != waiting_.end() && snapshot.waiting.size() < max_admitted; ++it) {
    snapshot.waiting.push_back((*it)->view());
  }
  return snapshot;
}

Stats InflightBatcher::stats() const {
  Stats stats = totals_;
  stats.queued = static_cast<std::int64_t>(waiting_.size());
  stats.running = static_cast<std::int64_t>(running_.size());
  stats.blocks_total = kv_.num_blocks();
  stats.blocks_used = kv_.num_used();
  return stats;
}

void InflightBatcher::check_invariants() const {
  const auto require = [](bool holds, const char* rule) {
    if (!holds) {
      throw Error(ErrorKind::kInternal, std::string("batcher breaks the rule: ") + rule);
    }
  };
  require(waiting_.size() + running_.size() == sequences_.size(), "a sequence either waits or runs");
  require(running_.size() <= static_cast<std::size_t>(limits_.scheduler.max_batch_size), "max_batch_size run at most");
  std::vector<const BlockTable*> tables;
  for (const auto& [id, sequence] : sequences_) {
    const SequenceView view = sequence->view();
    const bool waits = waiting_.contains(sequence.get());
    require(id == view.id, "sequences are filed under their ids");
    require(waits != running_.contains(sequence.get()), "a sequence either waits or runs");
    require(waits == (sequence->state == SequenceState::kQueued), "the state says whether it waits");
    require(sequence->state != SequenceState::kFinished, "finished sequences are forgotten");
    require(0 <= view.num_computed && view.num_computed < view.num_tokens && view.num_tokens < view.max_len,
            "0 ≤ num_computed < num_tokens < max_len");
    require(!waits || view.num_blocks == 0, "who waits holds no blocks");
    require(sequence->state != SequenceState::kGenerating || view.remaining() == 1, "a generation lacks one token");
    require(view.num_blocks >= kv_.blocks_for(view.num_computed), "blocks cover what is computed");
    require(view.num_blocks <= kv_.blocks_for(view.num_tokens), "no block is held ahead of need");
    tables.push_back(&sequence->table);
  }
  kv_.check_invariants(tables);
}

}  // namespace aotllm
