#pragma once

#include <string>
#include <vector>

#include "aotllm/tuned_linear.h"

namespace aotllm {

struct CpuTunerOptions {
  int num_threads = 0;    ///< that there are; 0 = default_num_threads()
  double seconds = 20.0;  ///< that it may take, about
};

/// What steps of at most `max_rows` rows run on, and what that gains.
struct TunedStep {
  int max_rows = 0;
  int threads = 0;
  double seconds = 0.0;          ///< of a step of max_rows rows, as chosen
  double default_seconds = 0.0;  ///< in turns with it, by the defaults
};

/// The contents of tactics.json for target cpu.
struct CpuTuning {
  std::string device;
  int threads = 0;  ///< that there are
  int own_rows = 0;
  std::vector<TunedStep> steps;      ///< by max_rows, ascending
  std::vector<TunedLinear> linears;  ///< those for which something else than the default was chosen
};

/// Times steps of the engine of `rank_file`, the way it runs: how many threads take part, whether rows are theirs, and
/// for each shape of a linear the tile and, of kernels with the same bits, the ISA. Candidates run in turns; another
/// one than the default is taken where it wins most of the turns by more than noise, and once more in whole steps at
/// the end. Where time is short, as with large models, fewer candidates and fewer numbers of rows are tried. Throws as
/// CpuRunner.
CpuTuning tune_cpu(const std::string& rank_file, const CpuTunerOptions& options);

}  // namespace aotllm
