// How sequences end.
#include <algorithm>
#include <utility>

#include "aotllm/errors.h"
#include "manager/inflight_batcher.h"

namespace aotllm {

void InflightBatcher::cancel(RequestId id, std::int32_t sequence_index) {
  const std::int32_t first = std::max(sequence_index, 0);
  auto it = by_request_.lower_bound({id, first});
  while (it != by_request_.end() && it->first.first == id) {
    if (sequence_index >= 0 && it->first.second != sequence_index) {
      return;
    }
    Sequence& sequence = at(it->second);
    ++it;  // the entry goes with its sequence
    end(sequence, FinishReason::kCancelled);
  }
}

void InflightBatcher::cancel_all() {
  while (!by_request_.empty()) {
    end(at(by_request_.begin()->second), FinishReason::kCancelled);
  }
}

void InflightBatcher::expire(Clock::time_point now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    ++totals_.timed_out;
    end(at(deadlines_.begin()->second), FinishReason::kTimeout);
  }
}

Clock::time_point InflightBatcher::next_deadline() const {
  return deadlines_.empty() ? Clock::time_point::max() : deadlines_.begin()->first;
}

void InflightBatcher::fail_all(const std::string& message) {
  plan_ = {};
  drop_steps(true);
  ahead_.spoil();
  while (!by_request_.empty()) {
    fail(at(by_request_.begin()->second), ErrorKind::kInternal, message);
  }
}

/// Ends the sequences of a step that did not come to its end: what it should have written is not there.
void InflightBatcher::fail_step(const std::string& message) {
  ahead_.spoil();
  for (const StepInputs::Entry& entry : step_.entries()) {
    if (entry.sequence == nullptr) {
      continue;
    }
    kv_.discard(entry.sequence->table);
    entry.sequence->num_computed = 0;
    fail(*entry.sequence, ErrorKind::kInternal, message);
  }
  if (copied_blocks_) {
    kv_.clear();  // who knows which copies were made
  }
}

void InflightBatcher::end(Sequence& sequence, FinishReason reason) {
  Response response = response_for(sequence);
  response.finish_reason = reason;
  finish(sequence, std::move(response));
}

void InflightBatcher::fail(Sequence& sequence, ErrorKind kind, const std::string& message) {
  ++totals_.failed;
  Response response = response_for(sequence);
  response.finish_reason = FinishReason::kError;
  response.error_kind = kind;
  response.error_message = message;
  finish(sequence, std::move(response));
}

/// Frees what the sequence holds, sends `response` as its last one and forgets it.
void InflightBatcher::finish(Sequence& sequence, Response response) {
  const Clock::time_point now = Clock::now();
  const auto since_submit = [&](Clock::time_point then) {
    return std::chrono::duration<double>(then - sequence.submitted).count();
  };
  response.timings.total_seconds = since_submit(now);
  response.timings.queue_seconds = since_submit(sequence.num_cached < 0 ? now : sequence.admitted);
  response.timings.first_token_seconds =
      sequence.first_token == Clock::time_point{} ? 0.0 : since_submit(sequence.first_token);
  if (sequence.state == SequenceState::kQueued) {
    waiting_.erase(sequence.id);
    queued_tokens_ -= sequence.num_prompt_tokens;
  } else {
    running_.erase(&sequence);
    if (waiting_.size() > 0) {
      ahead_.spoil();  // its place is for another one
    }
  }
  count_slots_.release(sequence);
  sequence.move_to(SequenceState::kFinished);
  sequence.keys.extend(sequence.tokens);
  kv_.release(sequence.table, sequence.keys, computed(sequence), sequence.retention);
  if (parts_.proposer != nullptr) {
    parts_.proposer->forget(sequence.id);
  }
  step_.drop(sequence);
  next_.drop(sequence);
  ++totals_.finished;
  responses_.push_back(std::move(response));
  deadlines_.erase({sequence.deadline, sequence.id});
  by_request_.erase({sequence.request_id, sequence.index});
  sequences_.erase(sequence.id);
}

Response InflightBatcher::response_for(const Sequence& sequence) const {
  Response response;
  response.request_id = sequence.request_id;
  response.sequence_index = sequence.index;
  response.num_prompt_tokens = sequence.num_prompt_tokens;
  response.num_cached_tokens = std::max(sequence.num_cached, 0);
  response.num_preemptions = sequence.num_preemptions;
  response.num_draft_tokens = sequence.num_draft_tokens;
  response.num_accepted_tokens = sequence.num_accepted_tokens;
  return response;
}

bool InflightBatcher::is_stop_token(const Sequence& sequence, TokenId token) const {
  const auto contains = [token](const std::vector<TokenId>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  // An end token that a grammar allows is the end of what it describes, whatever the request ignores.
  const bool ignore_eos = sequence.sampling.ignore_eos && sequence.constraint == nullptr;
  return contains(sequence.sampling.stop_token_ids) || (!ignore_eos && contains(limits_.eos_token_ids));
}

std::span<const TokenId> InflightBatcher::computed(const Sequence& sequence) const {
  return std::span(sequence.tokens).first(static_cast<std::size_t>(sequence.num_computed));
}

std::vector<Response> InflightBatcher::take_responses() {
  return std::exchange(responses_, {});
}

std::vector<StepStats> InflightBatcher::take_step_stats() {
  return std::exchange(step_stats_, {});
}

}  // namespace aotllm
