#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "aotllm/draft_proposer.h"
#include "aotllm/kv_cache.h"
#include "aotllm/model_runner.h"
#include "aotllm/request.h"
#include "aotllm/sampler.h"
#include "aotllm/scheduler.h"
#include "aotllm/stats.h"
#include "aotllm/waiting_queue.h"
#include "manager/background.h"
#include "manager/count_slots.h"
#include "manager/limits.h"
#include "manager/look_ahead.h"
#include "manager/sequence.h"
#include "manager/step_inputs.h"
#include "manager/watchdog.h"

namespace aotllm {

/// What a batcher works with.
struct BatcherParts {
  DraftProposer* proposer = nullptr;  ///< null = no speculation
  Background* background = nullptr;   ///< null = all in the caller's time
  Watchdog* watchdog = nullptr;       ///< null = nobody is told
};

/// The in-flight batch: which sequences wait and run, and how a step moves them on. All of the manager but its threads.
///
/// A step is `plan`, then `run`; `add`, `cancel` and `expire` come between steps. `run` makes the next plan and the
/// grammar masks in the background while the runner works. Where the runner has a queue and draws all tokens itself,
/// it is given the next step, too: that one is under way when `run` returns, and `plan` finds it planned. Otherwise
/// single-threaded.
class InflightBatcher {
 public:
  /// `runner` and `parts` outlive the batcher; `runner` has its KV memory for limits.kv_memory.
  InflightBatcher(ModelRunner& runner, const Limits& limits, const BatcherParts& parts = {});

  /// Queues a sequence in state kQueued that has its id.
  void add(std::unique_ptr<Sequence> sequence);

  /// Ends the sequences of a request, or the one of this index, as cancelled; no-op for what is not here.
  void cancel(RequestId id, std::int32_t sequence_index = -1);
  void cancel_all();

  /// Ends the sequences whose deadline is not after `now`.
  void expire(Clock::time_point now);

  /// When the next sequence expires; time_point::max() = none does.
  Clock::time_point next_deadline() const;

  /// Ends all sequences with an error of kind kInternal and drops the step in hand, if any.
  void fail_all(const std::string& message);

  /// Plans a step and makes room for it: preempts, admits, takes blocks.
  void plan();

  /// Runs what was planned and samples. A failure of the step ends its sequences, one in sampling ends its own only.
  void run();

  /// Forgets what is cached, but for what running sequences hold.
  void clear_cache() { kv_.clear(); }

  bool uses_adapter(AdapterId id) const;

  /// The responses, events and step records since the last call, in order.
  std::vector<Response> take_responses();
  std::vector<KvEvent> take_events() { return kv_.take_events(); }
  std::vector<StepStats> take_step_stats();

  bool idle() const { return sequences_.empty() && !under_way_; }

  /// The latest plan left sequences waiting, and some still do.
  bool saturated() const { return saturated_ && waiting_.size() > 0; }

  /// Prompt tokens of the sequences that wait.
  std::int64_t queued_tokens() const { return queued_tokens_; }

  Stats stats() const;

  /// Throws Error(kInternal) where states, lengths, ranks or blocks contradict each other.
  void check_invariants() const;

 private:
  struct RanksBefore {
    bool operator()(const Sequence* a, const Sequence* b) const { return ranks_before(a->view(), b->view()); }
  };

  Sequence& at(SequenceId id) const { return *sequences_.at(id); }

  // Planning (inflight_batcher.cc)
  void plan_from_truth();
  Snapshot snapshot(bool projected) const;
  void add_candidates(Snapshot& snapshot, std::size_t count) const;
  bool memory_is_scarce() const;
  std::size_t num_places() const {
    return static_cast<std::size_t>(limits_.scheduler.max_batch_size) - running_.size();
  }
  SequenceView waiting_view(const Sequence& sequence) const;
  void preempt(Sequence& sequence);
  void admit(Sequence& sequence);
  void enqueue(Sequence& sequence, bool preempted);
  void fill_step();
  void propose_drafts();

  // Running (batch_step.cc)
  bool run_step();
  void give_step();
  void copy_blocks();
  void plan_ahead();
  void run_ahead();
  void drop_steps(bool both);
  void fill_masks();
  void take_results();
  void score_prompt(const StepInputs::Entry& entry);
  void pool(const StepInputs::Entry& entry);
  void sample(const StepInputs::Entry& entry);
  void take_token(Sequence& sequence, std::span<const float> logits, std::span<const std::uint32_t> mask,
                  Response& response);
  void take_drawn(const StepInputs::Entry& entry, Response& response);
  TokenLogprobs drawn_logprobs(const StepInputs::Entry& entry, TokenId token) const;
  void take(Sequence& sequence, TokenId token, Response& response);
  void take_forced(Sequence& sequence, Response& response);
  void append(Sequence& sequence, TokenId token, Response& response);
  void check_mask(const StepInputs::Entry& entry) const;
  void record_step();

  // Ends (batch_ends.cc)
  void finish(Sequence& sequence, Response response);
  void end(Sequence& sequence, FinishReason reason);
  void fail(Sequence& sequence, ErrorKind kind, const std::string& message);
  void fail_step(const std::string& message);
  Response response_for(const Sequence& sequence) const;
  bool is_stop_token(const Sequence& sequence, TokenId token) const;
  std::span<const TokenId> computed(const Sequence& sequence) const;

  ModelRunner& runner_;
  const Limits limits_;
  const BatcherParts parts_;
  InlineBackground inline_;
  const Scheduler scheduler_;
  KvCache kv_;
  Sampler sampler_;

  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::map<std::pair<RequestId, std::int32_t>, SequenceId> by_request_;
  std::set<std::pair<Clock::time_point, SequenceId>> deadlines_;
  WaitingQueue waiting_;
  std::set<Sequence*, RanksBefore> running_;
  std::int64_t queued_tokens_ = 0;

  StepPlan plan_;
  CountSlots count_slots_;  ///< of the runner
  StepInputs step_;
  StepInputs next_;         ///< the step behind, where the runner has it already
  bool under_way_ = false;  ///< the runner has step_
  StepOutputs outputs_;
  LookAhead ahead_;  ///< the plan of the next step, made while this one runs
  const std::function<void()> side_job_;
  std::vector<std::pair<SequenceId, std::string>> mask_failures_;
  std::vector<DraftProposer::Query> queries_;
  std::vector<std::size_t> query_entries_;    ///< of plan_.sequences, by query
  std::vector<std::vector<TokenId>> drafts_;  ///< by entry of plan_.sequences; empty where nobody has any
  std::vector<RequestId> request_ids_;        ///< of the step, for the watchdog
  std::size_t num_running_before_ = 0;        ///< when the step was planned
  int num_empty_plans_ = 0;                   ///< in a row, at last
  bool copied_blocks_ = false;                ///< the step, or the one behind it, began with copies of blocks
  std::vector<Response> responses_;
  bool saturated_ = false;

  Stats totals_;  ///< the counters; stats() adds the state
  StepStats current_;
  Clock::time_point step_begun_{};
  std::vector<StepStats> step_stats_;
};

}  // namespace aotllm
