#include "runner/cpu_rank.h"

#include <algorithm>
#include <utility>

#include "engine/plan.h"

namespace aotllm {
namespace {

std::vector<std::vector<QkvUnit>> layer_units(const Plan& plan) {
  std::vector<std::vector<QkvUnit>> units(plan.kv.layers.size());
  for (const Op& op : plan.ops) {
    const auto* qkv = std::get_if<NormQkvRopeOp>(&op);
    if (qkv != nullptr) units[qkv->layer] = qkv_units(plan.linears[qkv->linear], qkv->heads);
  }
  return units;
}

}  // namespace

CpuRank::CpuRank(Engine engine, int num_threads, const cpu::Kernels& kernels)
    : engine_(std::move(engine)),
      units_(layer_units(plan())),
      tactics_(plan(), {}, kernels),
      space_(plan(), units_, num_threads),
      lora_(plan()),
      num_threads_(num_threads) {}

void CpuRank::set_profiling(bool on) {
  clocks_.assign(on ? static_cast<std::size_t>(num_threads_) : 0, OpClock(plan().ops.size()));
}

/// Takes over the residual stream, which the stage before has completed on all ranks.
void CpuRank::receive(const Worker& worker, const CpuRank& before) const {
  const float* from = before.space().buffer(before.plan().leaving);
  float* to = space_.buffer(plan().entering);
  const std::int64_t width = plan().hidden_size;
  const Range rows = split(worker.step.batch.rows(), worker.index, worker.count);
  std::copy(from + rows.begin * width, from + rows.end * width, to + rows.begin * width);
  worker.barrier();
}

void CpuRank::run(const Step& step, std::span<const Workspace* const> spaces, const CpuRank* before, int thread) const {
  const StepContext context{plan(), step.kernels, units_, tactics_,    spaces,      space_,
                            kv_,    step.batch,   lora_,  step.logits, step.hidden, step.pool};
  const ThreadPool::Member place = step.pool.member(thread);
  OpClock* clock = clocks_.empty() ? nullptr : &clocks_[static_cast<std::size_t>(place.index)];
  const bool owns_rows = place.count > 1 && step.batch.rows() / place.count >= step.own_rows;
  const Worker worker{context, place.index, place.count, thread, owns_rows, clock};
  if (clock != nullptr) clock->begin(0);
  compute_rope(worker);
  if (before != nullptr) receive(worker, *before);
  for (std::size_t i = 0; i < plan().ops.size(); ++i) {
    if (clock != nullptr) clock->begin(i);
    std::visit([&](const auto& o) { aotllm::run(worker, o); }, plan().ops[i]);
    if (clock != nullptr) clock->end();
  }
}

}  // namespace aotllm
