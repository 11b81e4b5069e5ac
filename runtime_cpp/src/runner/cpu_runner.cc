#include "aotllm/cpu_runner.h"

#include <utility>

#include "aotllm/errors.h"
#include "aotllm/thread_pool.h"
#include "engine/plan.h"
#include "kernels.h"
#include "runner/kv_pool.h"
#include "runner/lora.h"
#include "runner/ops.h"
#include "runner/step_batch.h"
#include "runner/workspace.h"
#include "support/cpu_topology.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr int kMaxThreads = 4096;

int resolve_threads(int num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("num_threads: expected 0 (automatic) to ", kMaxThreads, ", got ", num_threads), "num_threads");
  }
  return num_threads == 0 ? default_num_threads() : num_threads;
}

Engine checked(Engine engine) {
  if (engine.plan().target != Target::kCpu) {
    throw Error(ErrorKind::kEngineIncompatible, "the engine is not for target cpu; build it with --target cpu");
  }
  return engine;
}

std::vector<std::vector<QkvUnit>> layer_units(const Plan& plan) {
  std::vector<std::vector<QkvUnit>> units(plan.kv.layers.size());
  for (const Op& op : plan.ops) {
    const auto* qkv = std::get_if<NormQkvRopeOp>(&op);
    if (qkv != nullptr) units[qkv->layer] = qkv_units(plan.linears[qkv->linear], qkv->heads);
  }
  return units;
}

}  // namespace

struct CpuRunner::Impl {
  Impl(Engine engine_in, const CpuRunnerOptions& options)
      : engine(checked(std::move(engine_in))),
        kernels(options.kernels != nullptr ? *options.kernels : cpu::kernels()),
        units(layer_units(engine.plan())),
        pool(resolve_threads(options.num_threads)),
        space(engine.plan(), units, pool.num_threads()),
        batch(engine.shape()),
        lora(engine.plan()) {}

  Engine engine;
  const cpu::Kernels& kernels;
  std::vector<std::vector<QkvUnit>> units;
  ThreadPool pool;
  Workspace space;
  StepBatch batch;
  Lora lora;
  KvPool kv;
};

CpuRunner::CpuRunner(Engine engine, const CpuRunnerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(engine), options)) {}

CpuRunner::CpuRunner(CpuRunner&&) noexcept = default;
CpuRunner& CpuRunner::operator=(CpuRunner&&) noexcept = default;
CpuRunner::~CpuRunner() = default;

const ModelShape& CpuRunner::shape() const {
  return impl_->engine.shape();
}
int CpuRunner::num_threads() const noexcept {
  return impl_->pool.num_threads();
}
const KvAllocation& CpuRunner::kv_allocation() const noexcept {
  return impl_->kv.allocation();
}

void CpuRunner::allocate_kv(const KvAllocation& allocation) {
  if (impl_->kv.allocation().device_blocks[0] != 0)
    throw Error(ErrorKind::kInternal, "allocate_kv: called a second time");
  impl_->kv = KvPool(impl_->engine.plan().kv, allocation);
}

void CpuRunner::copy_blocks(std::span<const BlockCopy> copies) {
  impl_->kv.copy_blocks(copies);
}

void CpuRunner::load_adapter(AdapterId id, const Adapter& adapter) {
  impl_->lora.load(id, adapter);
}
void CpuRunner::unload_adapter(AdapterId id) {
  impl_->lora.unload(id);
}
std::int64_t CpuRunner::adapter_bytes() const noexcept {
  return impl_->lora.bytes();
}

void CpuRunner::step(std::span<const SequenceStep> sequences, StepOutputs& outputs) {
  Impl& impl = *impl_;
  const Plan& plan = impl.engine.plan();
  impl.batch.assign(sequences, impl.kv.allocation().device_blocks);
  impl.lora.assign(sequences);
  outputs.vocab_size = plan.vocab_size;
  outputs.logits.resize(impl.batch.logit_rows().size() * static_cast<std::size_t>(plan.vocab_size));
  outputs.hidden_size = plan.hidden_size;
  outputs.hidden.resize(impl.batch.hidden_rows().size() * static_cast<std::size_t>(plan.hidden_size));

  const StepContext context{plan,
                            impl.kernels,
                            impl.units,
                            impl.space,
                            impl.kv,
                            impl.batch,
                            impl.lora,
                            outputs.logits.data(),
                            outputs.hidden.data(),
                            impl.pool};
  impl.pool.parallel([&](int index, int count) {
    const Worker worker{context, index, count};
    compute_rope(worker);
    for (const Op& op : plan.ops) {
      std::visit([&](const auto& o) { run(worker, o); }, op);
    }
  });
}

}  // namespace aotllm
