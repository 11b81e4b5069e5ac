#pragma once

#include <initializer_list>
#include <span>
#include <vector>

#include "aotllm/thread_pool.h"
#include "engine/plan.h"
#include "kernels.h"
#include "runner/cpu_tactics.h"
#include "runner/kv_pool.h"
#include "runner/linear.h"
#include "runner/lora.h"
#include "runner/op_clock.h"
#include "runner/partition.h"
#include "runner/step_batch.h"
#include "runner/step_logits.h"
#include "runner/workspace.h"

namespace aotllm {

/// What the threads of a step share; those of a rank, where there are several.
struct StepContext {
  const Plan& plan;
  const cpu::Kernels& kernels;
  const std::vector<std::vector<QkvUnit>>& units;  ///< per layer
  const PlanTactics& tactics;
  std::span<const Workspace* const> spaces;  ///< of all ranks
  const Workspace& space;                    ///< this rank's
  const KvPool& kv;
  const StepBatch& batch;
  const Lora& lora;
  StepLogits& logits;  ///< of all ranks together
  float* hidden;       ///< [hidden rows, hidden_size], written by rank 0
  ThreadPool& pool;

  bool has_ranks() const noexcept { return spaces.size() > 1; }
  bool is_first_rank() const noexcept { return plan.tp_rank == 0; }
  /// Of the linear that multiplies all rows.
  const LinearTactic& tactic(int linear) const noexcept { return tactics.at(linear, batch.rows()); }
};

/// One thread's view of a step. All threads run the same ops in the same order, each on its share of rows and panels of
/// its rank's.
struct Worker {
  const StepContext& step;
  int index;  ///< among the threads of the rank
  int count;
  int thread;  ///< among those of all ranks
  /// Rows are many: each thread does all that concerns its own from op to op and finds in its caches what it wrote. Few
  /// rows are everybody's, and panels of weights are split.
  bool owns_rows;
  OpClock* clock = nullptr;  ///< where the step is profiled

  const ThreadSpace& own() const noexcept { return step.space.thread(index); }
  /// Of the rank.
  void barrier() const {
    const PartScope wait(clock, StepPart::kWait);
    step.pool.barrier(step.plan.tp_rank);
  }
  /// Of all ranks.
  void meet() const {
    const PartScope wait(clock, StepPart::kWait);
    step.pool.barrier();
  }
  Range own_rows() const noexcept { return split(step.batch.rows(), index, count); }
  /// 0, 1, 2, … to whichever thread of the rank asks next, until their next barrier.
  std::uint32_t next() const noexcept { return step.pool.next(step.plan.tp_rank); }
  /// This thread's share of what all ranks do together.
  Range common_share(std::int64_t items) const noexcept { return split(items, thread, step.pool.num_threads()); }
};

/// The rows that an op reads, and the norm that it applies to them.
struct Input {
  const float* x = nullptr;  ///< [rows, k]
  int k = 0;
  std::span<const float> norm;  ///< [k]; empty = none
  float eps = 0.0f;
  std::span<const std::int32_t> pick;  ///< rows of x to take, in order; empty = the first `rows`
  int rows = 0;

  /// Linears read a changed copy of x, not x itself.
  bool copied() const noexcept { return !norm.empty() || !pick.empty(); }
};

/// Normalizes, rounds and quantizes an op's input, once per distinct row, in the forms that its `linears` read. A
/// single row is prepared by every thread for itself (cheaper than a barrier), as are its own ones; other rows are
/// shared out and end with a barrier. Where rows have an adapter that updates the linears, its A · x is computed, too,
/// with a barrier more for few rows.
cpu::Activations prepare(const Worker& worker, const Input& input, std::initializer_list<int> linears);

/// The products of a tile of linear `linear`, as `multiply`, with what adapters add to them.
void product(const Worker& worker, int linear, const cpu::Activations& a, const Tile& tile, float* y,
             std::ptrdiff_t y_stride);

/// cos and sin of every row's position, for each RoPE table. No barrier at the end: the embedding that follows has one.
void compute_rope(const Worker& worker);

// Each op ends with a barrier where later ops read what it wrote.
void run(const Worker& worker, const EmbeddingOp& op);
void run(const Worker& worker, const NormQkvRopeOp& op);
void run(const Worker& worker, const PagedAttentionOp& op);
void run(const Worker& worker, const LinearResidualOp& op);
void run(const Worker& worker, const NormSwigluOp& op);
void run(const Worker& worker, const NormMoeOp& op);
void run(const Worker& worker, const LmHeadOp& op);

}  // namespace aotllm
