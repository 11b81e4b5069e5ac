#pragma once

#include <memory>
#include <string>
#include <vector>

#include "aotllm/model_runner.h"

namespace aotllm {

/// How an engine is run; each target takes what it knows.
struct RunnerOptions {
  int num_threads = 0;         ///< cpu: of all ranks together; 0 = default_num_threads()
  int device = 0;              ///< cuda: ordinal among the visible devices; of rank 0 where there are several
  std::vector<int> devices;    ///< cuda: of each rank, or one for all; empty = `device` and those that follow it
  bool deterministic = false;  ///< cuda: bits do not depend on the batch; slower (target cpu is always so)
  bool graphs = true;          ///< cuda: steps, but for long ones, are CUDA graphs
  std::string cublaslt;        ///< cuda: path of libcublasLt; empty = what the dynamic loader finds, if anything
  std::string tactics;         ///< text of the engine's tactics.json; empty = the defaults of plan or target
};

/// The runner for an engine's target. Where the engine is split over ranks, the files of the others lie beside
/// `rank_file`, and all run in this process. Throws what loading it throws, and Error(kEngineIncompatible) where this
/// build has no such target.
std::unique_ptr<ModelRunner> make_runner(const std::string& rank_file, const RunnerOptions& options);

/// This build can run engines of target cuda.
bool has_cuda() noexcept;

/// The refusal of builds that cannot: Error(kEngineIncompatible).
[[noreturn]] void refuse_without_cuda();

}  // namespace aotllm
