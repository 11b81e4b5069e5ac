#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "aotllm/kv_cache.h"
#include "aotllm/model_runner.h"
#include "aotllm/request.h"
#include "aotllm/sampler.h"
#include "aotllm/scheduler.h"
#include "aotllm/stats.h"
#include "manager/limits.h"
#include "manager/sequence.h"

namespace aotllm {

/// The in-flight batch: which sequences wait and run, and how a step moves them on. All of the manager but its thread.
///
/// A step is `plan`, then `run`; `add` and `cancel` come between steps. Single-threaded.
class InflightBatcher {
 public:
  /// `runner` outlives the batcher and has its KV memory for limits.num_kv_blocks.
  InflightBatcher(ModelRunner& runner, const Limits& limits);

  /// Queues a sequence in state kQueued.
  void add(std::unique_ptr<Sequence> sequence);

  /// Ends a sequence as cancelled; no-op for an id that is not here.
  void cancel(RequestId id);
  void cancel_all();

  /// Ends all sequences with an error of kind kInternal and drops the step in hand, if any.
  void fail_all(const std::string& message);

  /// Plans a step and makes room for it: preempts, admits, takes blocks.
  void plan();

  /// Runs what was planned and samples. A failure of the step ends its sequences, one in sampling ends its own only.
  void run();

  /// The responses since the last call, in order.
  std::vector<Response> take_responses();

  bool idle() const { return sequences_.empty(); }

  /// The latest plan left sequences waiting, and some still do.
  bool saturated() const { return saturated_ && !waiting_.empty(); }

  Stats stats() const;

  /// Throws Error(kInternal) where states, lengths, ranks or blocks contradict each other.
  void check_invariants() const;

 private:
  struct RanksBefore {
    bool operator()(const Sequence* a, const Sequence* b) const { return ranks_before(a->view(), b->view()); }
  };
  using RankedSet = std::set<Sequence*, RanksBefore>;

  Snapshot snapshot() const;
  void preempt(RequestId id);
  void admit(RequestId id);
  bool run_step();
  void sample(Sequence& sequence, std::span<const float> logits);
  void finish(Sequence& sequence, Response response);
  void fail(Sequence& sequence, ErrorKind kind, const std::string& message);
  void fail_step(const std::string& message);
  Response response_for(const Sequence& sequence) const;
  void release_blocks(Sequence& sequence);
  bool is_stop_token(const Sequence& sequence, TokenId token) const;

  ModelRunner& runner_;
  const Limits limits_;
  const Scheduler scheduler_;
  KvCache kv_;
  Sampler sampler_;

  std::unordered_map<RequestId, std::unique_ptr<Sequence>> sequences_;
  RankedSet waiting_;
  RankedSet running_;

  StepPlan plan_;
  std::vector<SequenceStep> step_;  ///< what the runner gets of plan_, entry by entry
  StepOutputs outputs_;
  std::vector<Response> responses_;
  bool saturated_ = false;
  Stats totals_;  ///< the counters; stats() adds the state
};

}  // namespace aotllm
