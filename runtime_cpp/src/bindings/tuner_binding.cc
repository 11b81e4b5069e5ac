#include <pybind11/pybind11.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "aotllm/cpu_tuner.h"
#ifdef AOTLLM_HAS_CUDA
#include "aotllm/cuda_tuner.h"
#include "engine/plan.h"
#include "runner/rank_files.h"
#endif
#include "aotllm/make_runner.h"
#include "aotllm/tuned_linear.h"
#include "bindings/bindings.h"

namespace aotllm {
namespace {

namespace py = pybind11;

/// As tactics.json has them.
py::list records_of(const std::vector<TunedLinear>& tuned) {
  py::list linears;
  for (const TunedLinear& linear : tuned) {
    py::list tactics;
    for (const TunedLinear::Choice& choice : linear.choices) {
      tactics.append(py::dict(py::arg("max_rows") = choice.max_rows, py::arg("kernel") = choice.kernel,
                              py::arg("seconds") = choice.seconds));
    }
    linears.append(py::dict(py::arg("format") = linear.format, py::arg("n") = linear.n, py::arg("k") = linear.k,
                            py::arg("tactics") = tactics));
  }
  return linears;
}

py::dict record_of(const CpuTuning& tuning) {
  py::list steps;
  for (const TunedStep& step : tuning.steps) {
    steps.append(py::dict(py::arg("max_rows") = step.max_rows, py::arg("threads") = step.threads,
                          py::arg("seconds") = step.seconds, py::arg("default_seconds") = step.default_seconds));
  }
  return py::dict(py::arg("device") = tuning.device, py::arg("threads") = tuning.threads,
                  py::arg("own_rows") = tuning.own_rows, py::arg("steps") = steps,
                  py::arg("linears") = records_of(tuning.linears));
}

#ifdef AOTLLM_HAS_CUDA
/// The shapes of all stages; those of a stage are timed only where it has one that no stage before has.
std::vector<TunedLinear> tune_stages(const std::vector<Engine>& ranks, const TunerOptions& options) {
  using Shape = std::tuple<MatrixFormat, int, int>;
  std::set<Shape> seen;
  std::set<std::tuple<std::string, int, int>> kept;
  std::vector<TunedLinear> all;
  for (const Engine& rank : ranks) {
    std::set<Shape> shapes;
    for (const Linear& linear : rank.plan().linears) shapes.emplace(linear.matrix.format, linear.n, linear.k);
    if (std::ranges::includes(seen, shapes)) continue;
    seen.merge(shapes);
    for (TunedLinear& linear : tune(rank, options)) {
      if (kept.emplace(linear.format, linear.n, linear.k).second) all.push_back(std::move(linear));
    }
  }
  return all;
}

std::vector<TunedLinear> tune_cuda(const std::string& rank_file, int device, const std::string& cublaslt) {
  return tune_stages(load_ranks(rank_file), {device, cublaslt});
}
#else
std::vector<TunedLinear> tune_cuda(const std::string&, int, const std::string&) {
  refuse_without_cuda();
}
#endif

}  // namespace

void bind_tuners(py::module_& module) {
  module.def(
      "tune_cpu",
      [](const std::string& rank_file, int num_threads, double seconds) {
        CpuTuning tuning;
        {
          const py::gil_scoped_release release;
          tuning = tune_cpu(rank_file, {num_threads, seconds});
        }
        return record_of(tuning);
      },
      py::arg("rank_file"), py::arg("num_threads") = 0, py::arg("seconds") = CpuTunerOptions{}.seconds,
      "Times how steps of an engine of target cpu may be run on this machine: what tactics.json holds, but for its "
      "version.");
  module.def(
      "tune",
      [](const std::string& rank_file, int device, const std::string& cublaslt) {
        std::vector<TunedLinear> tuned;
        {
          const py::gil_scoped_release release;
          tuned = tune_cuda(rank_file, device, cublaslt);
        }
        return records_of(tuned);
      },
      py::arg("rank_file"), py::arg("device") = 0, py::arg("cublaslt") = "",
      "Times the kernels of an engine's linears on the GPU: the records of tactics.json.");
}

}  // namespace aotllm
