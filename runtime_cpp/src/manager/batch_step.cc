// The step itself: the runner's part, what is done beside it, and what its logits become.
#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <utility>

#include "aotllm/errors.h"
#include "manager/inflight_batcher.h"
#include "sampling/nothing_allowed.h"
#include "support/strings.h"

namespace aotllm {

void InflightBatcher::run() {
  if (step_.empty()) {
    return;
  }
  if (run_step()) {
    if (parts_.watchdog != nullptr) {
      parts_.watchdog->enter(Watchdog::Phase::kSampling);
    }
    take_results();
  }
  for (const StepInputs::Entry& entry : step_.entries()) {
    current_.scheduled += 1;
    (entry.is_context ? current_.context_tokens : current_.generation_tokens) += entry.num_tokens;
  }
  record_step();
  plan_ = {};
  std::swap(step_, next_);
  next_.clear();
  under_way_ = !step_.empty();
  step_.schedule();
  if (parts_.watchdog != nullptr) {
    parts_.watchdog->end();
  }
}

/// Gives the planned step to the runner. False where it failed, and its sequences with it.
bool InflightBatcher::run_step() {
  ++totals_.steps;
  totals_.steps_planned_ahead += current_.planned_ahead ? 1 : 0;
  if (parts_.watchdog != nullptr) {
    request_ids_.clear();
    for (const StepInputs::Entry& entry : step_.entries()) {
      if (entry.sequence != nullptr) {
        request_ids_.push_back(entry.sequence->request_id);
      }
    }
    parts_.watchdog->describe(request_ids_, step_.num_tokens());
    parts_.watchdog->enter(Watchdog::Phase::kCopyingBlocks);
  }
  std::string failure;
  const Clock::time_point begin = Clock::now();
  Background& background = parts_.background != nullptr ? *parts_.background : inline_;
  background.start(side_job_);
  try {
    give_step();
    if (runner_.queues()) {
      background.wait();
      run_ahead();
      runner_.finish(outputs_);
    }
  } catch (const std::exception& e) {
    failure = cat("the step failed: ", e.what());
  } catch (...) {
    failure = "the step failed";
  }
  background.wait();
  under_way_ = false;
  current_.run_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  const auto check_size = [&failure](const char* what, std::size_t got, std::int32_t rows, std::int32_t width) {
    if (failure.empty() && got != static_cast<std::size_t>(rows) * static_cast<std::size_t>(width)) {
      failure = cat("the step returned ", got, " ", what, " for ", rows, " rows of ", width);
    }
  };
  check_size("logits", outputs_.logits.size(), step_.num_rows(), limits_.vocab_size);
  if (step_.num_hidden_rows() > 0) {
    check_size("hidden values", outputs_.hidden.size(), step_.num_hidden_rows(), limits_.hidden_size);
  }
  if (step_.num_drawn_tokens() > 0) {
    check_size("tokens", outputs_.tokens.size(), step_.num_drawn_tokens(), 1);
  }
  if (step_.num_drawn_logprobs() > 0) {
    const DrawnLogprobs& drawn = outputs_.drawn_logprobs;
    check_size("log-probabilities", drawn.logprobs.size(), step_.num_drawn_logprobs(), 1);
    check_size("listed tokens", drawn.top_ids.size(), step_.num_drawn_logprobs(), drawn.num_top);
    check_size("listed log-probabilities", drawn.top_logprobs.size(), step_.num_drawn_logprobs(), drawn.num_top);
  }
  if (failure.empty()) {
    return true;
  }
  drop_steps(false);
  fail_step(failure);
  return false;
}

/// Gives the step to the runner, which may have it already. One with a queue is then under way; others are done.
void InflightBatcher::give_step() {
  if (!under_way_) {
    copied_blocks_ = false;
    copy_blocks();
  }
  if (parts_.watchdog != nullptr) {
    parts_.watchdog->enter(Watchdog::Phase::kRunning);
  }
  if (!runner_.queues()) {
    runner_.step(step_.steps(), outputs_);
  } else if (!under_way_) {
    runner_.queue(step_.steps());
    under_way_ = true;
  }
}

/// Has the runner make the copies that the blocks taken since the last time ask for.
void InflightBatcher::copy_blocks() {
  const std::vector<BlockCopy> copies = kv_.take_copies();
  if (!copies.empty()) {
    copied_blocks_ = true;
    runner_.copy_blocks(copies);
  }
}

/// Gives the runner the next step behind the one under way, where the plan made ahead will do and nothing that comes of
/// this step is needed to begin it. Sequences that this step ends run a token in vain: what it writes lies behind all
/// that is kept of them, and in blocks that nobody writes before it.
void InflightBatcher::run_ahead() {
  const auto waits = [this](const ScheduledSequence& planned) { return !at(planned.id).can_run_ahead(); };
  if (!ahead_.valid() || parts_.proposer != nullptr || !step_.can_run_ahead() ||
      std::ranges::any_of(ahead_.plan().sequences, waits)) {
    return;
  }
  const StepPlan plan = ahead_.take();
  for (const ScheduledSequence& planned : plan.sequences) {
    Sequence& sequence = at(planned.id);
    const std::int32_t begin = sequence.num_computed + sequence.num_scheduled;
    const std::int32_t known = static_cast<std::int32_t>(sequence.tokens.size()) - begin;
    const std::int32_t num_tokens = known > 0 ? std::min(planned.num_tokens, known) : 1;
    if (kv_.can_grow(sequence.table, begin, begin + num_tokens)) {
      kv_.grow(sequence.table, begin, begin + num_tokens);
      next_.add_behind(sequence, num_tokens, kv_.num_groups());
    }
  }
  copy_blocks();
  if (!next_.empty()) {
    runner_.queue(next_.steps());
    ++totals_.steps_queued;
  }
}

/// Forgets the step behind the one in hand, and with `both` that one, too.
void InflightBatcher::drop_steps(bool both) {
  const int under_way = (both && under_way_ ? 1 : 0) + (next_.empty() ? 0 : 1);
  try {
    for (int i = 0; i < under_way; ++i) {
      runner_.finish(outputs_);
    }
  } catch (const std::exception&) {  // nothing is under way any more
  }
  next_.clear();
  if (both) {
    step_.clear();
    under_way_ = false;
  }
}

/// Plans the next step while this one runs. Reads the batch only.
void InflightBatcher::plan_ahead() {
  try {
    Snapshot projection = snapshot(true);
    add_candidates(projection, 1);  // if one would be admitted, the plan is not used
    ahead_.offer(scheduler_.plan(projection));
  } catch (const std::exception&) {
    ahead_.spoil();  // planned again after the step, where a fault is seen
  }
}

/// Masks of the rows that are sampled. A grammar that fails ends its own sequence, later.
void InflightBatcher::fill_masks() {
  mask_failures_.clear();
  step_.fill_masks([this](SequenceId id, const char* message) { mask_failures_.emplace_back(id, message); });
}

void InflightBatcher::take_results() {
  for (const StepInputs::Entry& entry : step_.entries()) {
    if (entry.sequence == nullptr) {
      continue;  // it ended while its step was under way
    }
    Sequence& sequence = *entry.sequence;
    sequence.num_scheduled = 0;
    totals_.context_tokens += entry.is_context ? entry.num_tokens : 0;
    sequence.num_computed += entry.num_tokens - entry.num_drafts;
    const SequenceId id = sequence.id;
    try {
      if (sequence.scores_prompt()) {
        score_prompt(entry);
      }
      if (entry.hidden) {
        pool(entry);
      } else if (entry.samples) {
        check_mask(entry);
        sample(entry);
      }
    } catch (const Error& e) {
      fail(sequence, e.kind(), cat("sampling failed: ", e.what()));
    } catch (const std::exception& e) {
      fail(sequence, ErrorKind::kInternal, cat("sampling failed: ", e.what()));
    }
    if (sequences_.contains(id)) {
      sequence.keys.extend(sequence.tokens);
      kv_.commit(sequence.table, sequence.keys, computed(sequence), sequence.retention);
    }
  }
}

/// Throws what went wrong with the entry's grammar mask, if anything did.
void InflightBatcher::check_mask(const StepInputs::Entry& entry) const {
  for (const auto& [id, message] : mask_failures_) {
    if (id == entry.sequence->id) {
      throw Error(ErrorKind::kInvalidRequest, cat("the grammar gives no mask: ", message), "structured_outputs");
    }
  }
}

/// Log-probabilities of the prompt tokens behind those of a chunk. Its num_computed is past the chunk already.
void InflightBatcher::score_prompt(const StepInputs::Entry& entry) {
  Sequence& sequence = *entry.sequence;
  const std::int32_t begin = sequence.num_computed - entry.num_tokens;
  for (std::int32_t i = 0; i < entry.num_tokens && begin + i + 1 < sequence.num_prompt_tokens; ++i) {
    if (static_cast<std::int32_t>(sequence.prompt_logprobs.size()) > begin + i) {
      continue;  // computed again after preemption
    }
    const TokenId token = sequence.tokens[static_cast<std::size_t>(begin + i + 1)];
    sequence.prompt_logprobs.push_back(
        sampler_.logprobs(outputs_.row(entry.first_row + i), token, sequence.num_prompt_logprobs));
  }
}

/// Takes the hidden states of a chunk into the embedding; with the last one the sequence ends. Its num_computed is past
/// the chunk already.
void InflightBatcher::pool(const StepInputs::Entry& entry) {
  Sequence& sequence = *entry.sequence;
  sequence.pooled.resize(static_cast<std::size_t>(limits_.hidden_size));
  const std::int32_t begin = sequence.num_computed - entry.num_rows;
  for (std::int32_t i = 0; i < entry.num_rows; ++i) {
    if (begin + i < sequence.num_pooled) {
      continue;  // computed again after preemption
    }
    const std::span<const float> row = outputs_.hidden_row(entry.first_row + i);
    std::transform(row.begin(), row.end(), sequence.pooled.begin(), sequence.pooled.begin(), std::plus<>());
    sequence.num_pooled = begin + i + 1;
  }
  if (!entry.samples) {
    return;
  }
  const double count = sequence.pooling == Pooling::kMean ? sequence.num_prompt_tokens : 1;
  Response response = response_for(sequence);
  for (const double sum : sequence.pooled) {
    response.embedding.push_back(static_cast<float>(sum / count));
  }
  if (!std::ranges::all_of(response.embedding, [](float value) { return std::isfinite(value); })) {
    throw Error(ErrorKind::kInternal, "the embedding is not finite; the engine or its weights are damaged");
  }
  response.finish_reason = FinishReason::kStop;
  finish(sequence, std::move(response));
}

/// Draws the tokens that the rows of `entry` give: one, and one more for each draft that it proves right.
void InflightBatcher::sample(const StepInputs::Entry& entry) {
  Sequence& sequence = *entry.sequence;
  if (sequence.state == SequenceState::kContext) {
    sequence.move_to(SequenceState::kGenerating);
  }
  const std::span<const TokenId> drafts = step_.drafts(entry);
  Response response = response_for(sequence);
  std::int32_t accepted = 0;
  if (entry.token >= 0) {
    take_drawn(entry, response);
  }
  for (std::int32_t i = 0; i <= entry.num_drafts && entry.token < 0; ++i) {
    take_token(sequence, outputs_.row(entry.first_sampled_row() + i), step_.mask(entry), response);
    if (response.finish_reason || i == entry.num_drafts ||
        sequence.tokens.back() != drafts[static_cast<std::size_t>(i)]) {
      break;
    }
    ++accepted;
    ++sequence.num_computed;
  }
  sequence.num_draft_tokens += entry.num_drafts;
  sequence.num_accepted_tokens += accepted;
  response.num_draft_tokens = sequence.num_draft_tokens;
  response.num_accepted_tokens = sequence.num_accepted_tokens;
  totals_.draft_tokens += entry.num_drafts;
  totals_.accepted_tokens += accepted;
  if (sequence.constraint != nullptr && !response.finish_reason) {
    take_forced(sequence, response);
  }
  if (sequence.scores_prompt()) {
    response.prompt_logprobs = std::move(sequence.prompt_logprobs);
    sequence.prompt_scored = true;
  }
  if (response.finish_reason) {
    finish(sequence, std::move(response));
  } else {
    responses_.push_back(std::move(response));
  }
}

/// Appends the token that `logits` [vocab_size] give, and sets the finish reason if it is the last one.
void InflightBatcher::take_token(Sequence& sequence, std::span<const float> logits, std::span<const std::uint32_t> mask,
                                 Response& response) {
  const TokenId token = sampler_.sample(logits, {.params = sequence.sampling,
                                                 .processors = sequence.processors,
                                                 .tokens = sequence.tokens,
                                                 .num_prompt_tokens = sequence.num_prompt_tokens,
                                                 .seed = sequence.seed,
                                                 .sequence_index = static_cast<std::uint32_t>(sequence.index),
                                                 .mask = mask});
  if (sequence.num_logprobs >= 0) {
    response.logprobs.push_back(sampler_.logprobs(logits, token, sequence.num_logprobs));
  }
  if (sequence.return_logits) {
    response.logits.emplace_back(logits.begin(), logits.end());
  }
  take(sequence, token, response);
}

/// Appends the token that the runner drew for `entry`.
void InflightBatcher::take_drawn(const StepInputs::Entry& entry, Response& response) {
  Sequence& sequence = *entry.sequence;
  const TokenId token = outputs_.tokens[static_cast<std::size_t>(entry.token)];
  if (token == kNothingAllowed) {
    throw nothing_allowed(entry.mask >= 0 || !sequence.processors.empty());
  }
  if (token < 0 || token >= limits_.vocab_size) {
    throw Error(ErrorKind::kInternal, token == kDamagedRow
                                          ? "a logit is NaN or +inf; the engine or its weights are damaged"
                                          : cat("the runner drew token ", token, " of ", limits_.vocab_size));
  }
  if (entry.logprobs >= 0) {
    response.logprobs.push_back(drawn_logprobs(entry, token));
  }
  take(sequence, token, response);
}

/// What the runner says of `token`, which it drew for `entry`.
TokenLogprobs InflightBatcher::drawn_logprobs(const StepInputs::Entry& entry, TokenId token) const {
  const DrawnLogprobs& drawn = outputs_.drawn_logprobs;
  const auto place = static_cast<std::size_t>(entry.logprobs);
  const auto num_top = static_cast<std::size_t>(entry.sequence->num_logprobs);
  TokenLogprobs result{token, drawn.logprobs[place], {}};
  if (std::isnan(result.logprob) || num_top > static_cast<std::size_t>(drawn.num_top)) {
    throw Error(ErrorKind::kInternal,
                std::isnan(result.logprob)
                    ? "a logit is NaN or +inf; the engine or its weights are damaged"
                    : cat("the runner lists ", drawn.num_top, " tokens where ", num_top, " are asked for"));
  }
  for (std::size_t i = place * static_cast<std::size_t>(drawn.num_top); result.top.size() < num_top; ++i) {
    result.top.emplace_back(drawn.top_ids[i], drawn.top_logprobs[i]);
  }
  return result;
}

/// Appends `token`, and sets the finish reason if it is the last one.
void InflightBatcher::take(Sequence& sequence, TokenId token, Response& response) {
  if (sequence.first_token == Clock::time_point{}) {
    sequence.first_token = Clock::now();
  }
  append(sequence, token, response);
  if (sequence.constraint != nullptr && !response.stop_token_id) {
    sequence.constraint->accept(token);
    if (sequence.constraint->finished()) {
      response.finish_reason = FinishReason::kStop;
    }
  }
}

/// Appends the tokens that the grammar forces next: they need no draw and no step of their own. Requests that want to
/// see logits of every token go the long way.
void InflightBatcher::take_forced(Sequence& sequence, Response& response) {
  if (sequence.num_logprobs >= 0 || sequence.return_logits) {
    return;
  }
  const std::int32_t room = sequence.max_len - static_cast<std::int32_t>(sequence.tokens.size());
  for (const TokenId token : sequence.constraint->take_forced(room)) {
    append(sequence, token, response);
    ++totals_.forced_tokens;
    ahead_.spoil();  // it has more to compute than was foreseen
    if (response.finish_reason) {
      return;
    }
  }
  if (sequence.constraint->finished()) {
    response.finish_reason = FinishReason::kStop;
  }
}

void InflightBatcher::append(Sequence& sequence, TokenId token, Response& response) {
  sequence.tokens.push_back(token);
  response.token_ids.push_back(token);
  ++totals_.generated_tokens;
  if (is_stop_token(sequence, token)) {
    response.finish_reason = FinishReason::kStop;
    response.stop_token_id = token;
  } else if (sequence.tokens.size() >= static_cast<std::size_t>(sequence.max_len)) {
    response.finish_reason = FinishReason::kLength;
  }
}

void InflightBatcher::record_step() {
  current_.latency_seconds = std::chrono::duration<double>(Clock::now() - step_begun_).count();
  current_.queued = static_cast<std::int32_t>(waiting_.size());
  current_.paused = std::max(0, static_cast<std::int32_t>(num_running_before_) - current_.scheduled);
  totals_.last_step = current_;
  step_stats_.push_back(current_);
}

}  // namespace aotllm
