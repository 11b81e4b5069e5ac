#include "aotllm/cuda_runner.h"

#include <utility>

#include "aotllm/errors.h"
#include "engine/plan.h"
#include "runner/cuda/device.h"
#include "runner/cuda/rank.h"
#include "support/free_memory.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// The only rank of an engine.
cuda::Rank make_rank(Engine engine, const CudaRunnerOptions& options) {
  const Plan& plan = engine.plan();
  cuda::check_target(plan);
  if (plan.num_ranks() > 1) {
    throw Error(ErrorKind::kEngineIncompatible,
                cat("the file is one of ", plan.num_ranks(), " ranks, which run together (TpRunner)"));
  }
  cuda::open_device(options.device, plan.sm);  // whose stream is made next
  cuda::OwnedStream stream;
  return cuda::Rank(std::move(engine), options, std::move(stream), nullptr);
}

}  // namespace

struct CudaRunner::Impl {
  Impl(Engine engine, const CudaRunnerOptions& options)
      : rank(make_rank(std::move(engine), options)), check(rank.engine().shape()) {}

  /// After a failure no step is under way.
  template <class Work>
  void or_nothing(Work&& work) {
    try {
      work();
    } catch (...) {
      rank.abandon();
      throw;
    }
  }

  cuda::Rank rank;
  cuda::StepCheck check;
};

CudaRunner::CudaRunner(Engine engine, const CudaRunnerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(engine), options)) {}
CudaRunner::~CudaRunner() = default;

const ModelShape& CudaRunner::shape() const {
  return impl_->rank.engine().shape();
}

bool CudaRunner::samples() const noexcept {
  return cuda::StepSampler::samples(shape());
}

SamplingSupport CudaRunner::sampling_support() const noexcept {
  return cuda::StepSampler::support(shape());
}

FreeMemory CudaRunner::free_memory() const {
  impl_->rank.select();
  return {cuda::free_cache_bytes(), aotllm::free_memory(), false};
}

const KvAllocation& CudaRunner::kv_allocation() const noexcept {
  return impl_->rank.kv_allocation();
}

void CudaRunner::allocate_kv(const KvAllocation& allocation) {
  impl_->rank.select();
  impl_->rank.allocate_kv(allocation);
}

void CudaRunner::copy_blocks(std::span<const BlockCopy> copies) {
  impl_->rank.select();
  impl_->rank.copy_blocks(copies);
}

void CudaRunner::step(std::span<const SequenceStep> sequences, StepOutputs& outputs) {
  queue(sequences);
  finish(outputs);
}

void CudaRunner::queue(std::span<const SequenceStep> sequences) {
  impl_->or_nothing([&] {
    impl_->check(sequences, impl_->rank.kv_allocation().device_blocks);
    impl_->rank.select();
    impl_->rank.begin(sequences);
  });
}

void CudaRunner::finish(StepOutputs& outputs) {
  impl_->or_nothing([&] { impl_->rank.finish(outputs); });
}

}  // namespace aotllm
