#include "aotllm/make_runner.h"

#include <cstdlib>
#include <utility>
#include <vector>

#include "aotllm/cpu_runner.h"
#include "aotllm/engine.h"
#include "aotllm/errors.h"
#include "engine/plan.h"
#include "runner/rank_files.h"
#include "support/free_memory.h"

#ifdef AOTLLM_HAS_CUDA
#include "aotllm/cuda_runner.h"
#include "aotllm/tp_runner.h"
#endif

namespace aotllm {
#ifdef AOTLLM_HAS_CUDA
namespace {

/// Asks the driver for what kernels that wait for other ranks need, where the user has not said otherwise. It listens
/// only before its first use in the process.
void prepare_driver_for_ranks() {
  // To load a kernel when it is first launched may wait for all work of its device, which may wait for another rank.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  // A queue for each stream: ranks that share a device and a queue would wait for each other.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

std::unique_ptr<ModelRunner> make_cuda_runner(std::vector<Engine> ranks, const RunnerOptions& options) {
  CudaRunnerOptions cuda;
  cuda.deterministic = options.deterministic;
  cuda.graphs = options.graphs;
  cuda.cublaslt = options.cublaslt;
  cuda.tactics = options.tactics;
  const std::vector<int> devices = rank_devices(options.devices, options.device, static_cast<int>(ranks.size()));
  if (ranks.size() == 1) {
    cuda.device = devices.front();
    return std::make_unique<CudaRunner>(std::move(ranks.front()), cuda);
  }
  prepare_driver_for_ranks();
  return std::make_unique<TpRunner>(std::move(ranks), devices, cuda);
}

}  // namespace
#endif

FreeMemory ModelRunner::free_memory() const {
  return FreeMemory::of_host(aotllm::free_memory());
}

std::unique_ptr<ModelRunner> make_runner(const std::string& rank_file, const RunnerOptions& options) {
  std::vector<Engine> ranks = load_ranks(rank_file);
  if (ranks.front().plan().target == Target::kCpu) {
    auto runner = std::make_unique<CpuRunner>(std::move(ranks), CpuRunnerOptions{options.num_threads, nullptr});
    runner->set_tactics(options.tactics);
    return runner;
  }
#ifdef AOTLLM_HAS_CUDA
  return make_cuda_runner(std::move(ranks), options);
#else
  refuse_without_cuda();
#endif
}

void refuse_without_cuda() {
  throw Error(ErrorKind::kEngineIncompatible,
              "the engine is for target cuda, and this build of aotllm has no CUDA; install one that has "
              "(AOTLLM_CUDA=1 pip install . in its sources), or build the engine with --target cpu");
}

bool has_cuda() noexcept {
#ifdef AOTLLM_HAS_CUDA
  return true;
#else
  return false;
#endif
}

}  // namespace aotllm
