#include "aotllm/cpu_runner.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "aotllm/errors.h"
#include "aotllm/thread_pool.h"
#include "engine/plan.h"
#include "kernels.h"
#include "runner/cpu_rank.h"
#include "runner/cpu_tactics.h"
#include "runner/cpu_tactics_file.h"
#include "runner/rank_files.h"
#include "support/cpu_topology.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr int kMaxThreads = 4096;

int resolve_threads(int num_threads, int least) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("num_threads: expected 0 (automatic) to ", kMaxThreads, ", got ", num_threads), "num_threads");
  }
  return std::max(num_threads == 0 ? default_num_threads() : num_threads, least);
}

std::vector<Engine> checked(std::vector<Engine> engines) {
  check_ranks(engines);
  if (engines.front().plan().target != Target::kCpu) {
    throw Error(ErrorKind::kEngineIncompatible, "the engine is not for target cpu; build it with --target cpu");
  }
  return engines;
}

std::vector<Engine> one(Engine engine) {
  std::vector<Engine> engines;
  engines.push_back(std::move(engine));
  return engines;
}

/// Of all ranks together.
ModelShape shape_of(const std::vector<Engine>& engines) {
  ModelShape shape = engines.front().shape();
  for (std::size_t rank = 1; rank < engines.size(); ++rank) {
    for (std::size_t group = 0; group < shape.kv_groups.size(); ++group) {
      shape.kv_groups[group].bytes_per_block += engines[rank].shape().kv_groups[group].bytes_per_block;
    }
  }
  return shape;
}

}  // namespace

struct CpuRunner::Impl {
  Impl(std::vector<Engine> engines, const CpuRunnerOptions& options)
      : kernels(options.kernels != nullptr ? *options.kernels : cpu::kernels()),
        shape(shape_of(engines)),
        tp(engines.front().plan().tp_size),
        pool(resolve_threads(options.num_threads, tp), tp),
        batch(shape),
        logits(shape, pool.num_threads()) {
    for (Engine& engine : engines) {
      ranks.push_back(std::make_unique<CpuRank>(std::move(engine), (pool.capacity() + tp - 1) / tp, kernels));
      spaces.push_back(&ranks.back()->space());
    }
    resolve_own_rows();
  }

  const CpuRank& first() const noexcept { return *ranks.front(); }
  void resolve_own_rows() {
    if (tactics.own_rows == 0) tactics.own_rows = default_own_rows(first().plan().linears, kernels);
  }
  /// That run a step of so many rows.
  int threads_of(int rows) const noexcept {
    if (tactics.steps.empty()) return pool.capacity();
    return std::clamp(tactic_for(std::span<const StepTactic>(tactics.steps), rows).threads, tp, pool.capacity());
  }
  /// The stages one after the other, on one thread.
  void run(const CpuRank::Step& step, int thread);

  const cpu::Kernels& kernels;
  ModelShape shape;
  int tp;           ///< ranks of a stage
  ThreadPool pool;  ///< a team for each of them; the stages take turns
  StepBatch batch;
  StepLogits logits;
  std::vector<std::unique_ptr<CpuRank>> ranks;  ///< [stage, rank of the stage]
  std::vector<const Workspace*> spaces;         ///< of the ranks
  std::optional<StepProfile> profile;           ///< steps and their seconds; the ranks have the ops
  CpuTactics tactics;                           ///< of steps; the ranks have those of linears
  std::string tactics_note;
};

void CpuRunner::Impl::run(const CpuRank::Step& step, int thread) {
  const auto size = static_cast<std::size_t>(tp);
  const auto team = static_cast<std::size_t>(pool.member(thread).team);
  const CpuRank* before = nullptr;
  for (std::size_t stage = 0; stage < ranks.size(); stage += size) {
    const CpuRank* rank = ranks[stage + team].get();
    rank->run(step, std::span(spaces).subspan(stage, size), before, thread);
    before = rank;
  }
  if (logits.waits()) {
    pool.barrier();
    logits.draw(thread, pool.num_threads());
  }
}

CpuRunner::CpuRunner(Engine engine, const CpuRunnerOptions& options) : CpuRunner(one(std::move(engine)), options) {}
CpuRunner::CpuRunner(std::vector<Engine> ranks, const CpuRunnerOptions& options)
    : impl_(std::make_unique<Impl>(checked(std::move(ranks)), options)) {}

CpuRunner::CpuRunner(CpuRunner&&) noexcept = default;
CpuRunner& CpuRunner::operator=(CpuRunner&&) noexcept = default;
CpuRunner::~CpuRunner() = default;

const ModelShape& CpuRunner::shape() const {
  return impl_->shape;
}
int CpuRunner::num_threads() const noexcept {
  return impl_->pool.capacity();
}
const KvAllocation& CpuRunner::kv_allocation() const noexcept {
  return impl_->first().kv().allocation();
}

void CpuRunner::allocate_kv(const KvAllocation& allocation) {
  if (kv_allocation().device_blocks[0] != 0) throw Error(ErrorKind::kInternal, "allocate_kv: called a second time");
  std::vector<const KvPlan*> plans;
  for (const auto& rank : impl_->ranks) plans.push_back(&rank->plan().kv);
  std::vector<KvPool> pools = make_kv_pools(plans, allocation);
  for (std::size_t rank = 0; rank < pools.size(); ++rank) impl_->ranks[rank]->kv() = std::move(pools[rank]);
}

void CpuRunner::copy_blocks(std::span<const BlockCopy> copies) {
  for (const auto& rank : impl_->ranks) rank->kv().copy_blocks(copies);
}

void CpuRunner::load_adapter(AdapterId id, const Adapter& adapter) {
  if (impl_->ranks.size() > 1) {
    throw Error(ErrorKind::kInvalidRequest,
                "adapter: engines of several ranks take none; build the engine with --tp 1 --pp 1", "adapter");
  }
  impl_->ranks.front()->lora().load(id, adapter);
}
void CpuRunner::unload_adapter(AdapterId id) {
  impl_->ranks.front()->lora().unload(id);
}
std::int64_t CpuRunner::adapter_bytes() const noexcept {
  return impl_->ranks.front()->lora().bytes();
}

void CpuRunner::step(std::span<const SequenceStep> sequences, StepOutputs& outputs) {
  Impl& impl = *impl_;
  impl.batch.assign(sequences, kv_allocation().device_blocks);
  for (const auto& rank : impl.ranks) rank->lora().assign(sequences);
  impl.logits.assign(sequences, outputs);
  outputs.hidden_size = impl.shape.hidden_size;
  outputs.hidden.resize(impl.batch.hidden_rows().size() * static_cast<std::size_t>(outputs.hidden_size));

  impl.pool.resize(impl.threads_of(impl.batch.rows()));
  const CpuRank::Step step{impl.kernels,          impl.batch, impl.logits,
                           outputs.hidden.data(), impl.pool,  impl.tactics.own_rows};
  const auto begin = std::chrono::steady_clock::now();
  impl.pool.parallel([&](int thread, int /*count*/) { impl.run(step, thread); });
  impl.logits.finish(outputs);
  if (impl.profile) {
    ++impl.profile->steps;
    impl.profile->seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
}

void CpuRunner::set_tactics(const CpuTactics& tactics) {
  for (const auto& rank : impl_->ranks) rank->set_tactics(tactics, impl_->kernels);
  impl_->tactics = tactics;
  impl_->resolve_own_rows();
}

void CpuRunner::set_tactics(const std::string& text) {
  std::vector<const Plan*> plans;
  for (const auto& rank : impl_->ranks) plans.push_back(&rank->plan());
  CpuTactics tactics;
  std::string note;
  if (!text.empty()) {
    TacticsFile file = TacticsFile::parse(text);
    note = file.why_unfit(impl_->kernels, num_threads(), plans);
    if (note.empty()) tactics = std::move(file.tactics);
  }
  set_tactics(tactics);
  impl_->tactics_note = std::move(note);
}

std::string CpuRunner::tactics_note() const {
  return impl_->tactics_note;
}

void CpuRunner::set_profiling(bool on) {
  impl_->profile.reset();
  if (on) impl_->profile = StepProfile{0, num_threads(), 0.0, {}};
  for (const auto& rank : impl_->ranks) rank->set_profiling(on);
}

StepProfile CpuRunner::profile() const {
  StepProfile profile = impl_->profile.value_or(StepProfile{});
  if (impl_->profile) {
    for (const auto& rank : impl_->ranks) rank->add_profile(profile.ops);
  }
  return profile;
}

}  // namespace aotllm
