#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/adapter.h"
#include "aotllm/cpu_runner.h"
#include "aotllm/errors.h"
#include "aotllm/make_runner.h"
#include "bindings/bindings.h"
#include "engine/plan.h"
#include "runner/rank_files.h"
#include "support/strings.h"

namespace aotllm {
namespace {

namespace py = pybind11;

LogitsMode parse_logits_mode(const std::string& name) {
  if (name == "none") return LogitsMode::kNone;
  if (name == "last") return LogitsMode::kLast;
  if (name == "all") return LogitsMode::kAll;
  throw Error(ErrorKind::kInvalidRequest, cat("logits: expected none, last or all, got \"", name, '"'), "logits");
}

void check_length(const char* param, std::size_t length, std::size_t sequences) {
  if (length == sequences) return;
  throw Error(ErrorKind::kInvalidRequest,
              cat(param, ": expected one entry for each of the ", sequences, " sequences, got ", length), param);
}

/// Hands the logits to numpy without a copy.
py::array_t<float> to_array(StepOutputs outputs) {
  const py::ssize_t shape[] = {outputs.rows(), outputs.vocab_size};
  auto data = std::make_unique<std::vector<float>>(std::move(outputs.logits));
  float* values = data->data();
  const py::capsule owner(data.get(), [](void* p) { delete static_cast<std::vector<float>*>(p); });
  data.release();
  return py::array_t<float>(shape, values, owner);
}

/// One table of each sequence serves all groups. What is given must outlive what is returned.
std::vector<SequenceStep> sequences_of(const std::vector<std::vector<TokenId>>& tokens,
                                       const std::vector<std::int32_t>& start_positions,
                                       const std::vector<std::vector<BlockId>>& block_tables) {
  check_length("start_positions", start_positions.size(), tokens.size());
  check_length("block_tables", block_tables.size(), tokens.size());
  std::vector<SequenceStep> sequences;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    SequenceStep& sequence = sequences.emplace_back();
    sequence.tokens = tokens[i];
    sequence.start_position = start_positions[i];
    sequence.block_tables.fill(block_tables[i]);
  }
  return sequences;
}

/// A runner behind a lock: steps release the GIL, and Python may call from several threads.
class PyRunner {
 public:
  PyRunner(std::unique_ptr<ModelRunner> runner, std::int32_t num_blocks)
      : runner_(std::move(runner)), num_blocks_(num_blocks) {
    KvAllocation allocation;
    allocation.device_blocks.fill(num_blocks);
    runner_->allocate_kv(allocation);
  }

  const ModelShape& shape() const noexcept { return runner_->shape(); }
  std::int32_t num_blocks() const noexcept { return num_blocks_; }

  py::array_t<float> step(const std::vector<std::vector<TokenId>>& tokens,
                          const std::vector<std::int32_t>& start_positions,
                          const std::vector<std::vector<BlockId>>& block_tables, const std::vector<std::string>& logits,
                          const std::vector<AdapterId>& adapters) {
    std::vector<SequenceStep> sequences = sequences_of(tokens, start_positions, block_tables);
    check_length("logits", logits.size(), tokens.size());
    if (!adapters.empty()) check_length("adapters", adapters.size(), tokens.size());
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      sequences[i].logits = parse_logits_mode(logits[i]);
      sequences[i].adapter = adapters.empty() ? 0 : adapters[i];
    }
    StepOutputs outputs;
    {
      const py::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      runner_->step(sequences, outputs);
    }
    return to_array(std::move(outputs));
  }

  /// Logits do not leave the runner.
  std::vector<TokenId> next_tokens(const std::vector<std::vector<TokenId>>& tokens,
                                   const std::vector<std::int32_t>& start_positions,
                                   const std::vector<std::vector<BlockId>>& block_tables) {
    std::vector<SequenceStep> sequences = sequences_of(tokens, start_positions, block_tables);
    if (!runner_->samples()) {
      throw Error(ErrorKind::kInvalidRequest, "next_tokens: this engine's runner does not sample");
    }
    for (SequenceStep& sequence : sequences) sequence.sampling.emplace();
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    runner_->step(sequences, outputs_);
    return outputs_.tokens;
  }

  void load_adapter(AdapterId id, const Adapter& adapter) {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    runner_->load_adapter(id, adapter);
  }

  void unload_adapter(AdapterId id) {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    runner_->unload_adapter(id);
  }

  std::int64_t adapter_bytes() {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return runner_->adapter_bytes();
  }

 protected:
  ModelRunner& runner() noexcept { return *runner_; }
  std::mutex& mutex() noexcept { return mutex_; }

 private:
  std::unique_ptr<ModelRunner> runner_;
  std::int32_t num_blocks_;
  std::mutex mutex_;
  StepOutputs outputs_;  ///< of next_tokens
};

class PyCpuRunner : public PyRunner {
 public:
  PyCpuRunner(const std::string& rank_file, std::int32_t num_blocks, int num_threads, const std::string& tactics)
      : PyRunner(std::make_unique<CpuRunner>(load_ranks(rank_file), CpuRunnerOptions{num_threads, nullptr}),
                 num_blocks) {
    cpu().set_tactics(tactics);
  }

  std::string tactics_note() { return cpu().tactics_note(); }

  void set_profiling(bool on) {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex());
    cpu().set_profiling(on);
  }

  /// The fields of StepProfile, as a dict.
  py::dict profile() {
    StepProfile profile;
    {
      const py::gil_scoped_release release;
      const std::lock_guard lock(mutex());
      profile = cpu().profile();
    }
    py::list ops;
    for (const OpProfile& op : profile.ops) {
      ops.append(py::dict(py::arg("op") = op.op, py::arg("shape") = op.shape, py::arg("count") = op.count,
                          py::arg("bytes") = op.bytes, py::arg("prepare_seconds") = op.prepare_seconds,
                          py::arg("compute_seconds") = op.compute_seconds, py::arg("wait_seconds") = op.wait_seconds));
    }
    return py::dict(py::arg("steps") = profile.steps, py::arg("threads") = profile.threads,
                    py::arg("seconds") = profile.seconds, py::arg("ops") = ops);
  }

 private:
  CpuRunner& cpu() noexcept { return static_cast<CpuRunner&>(runner()); }
};

#ifdef AOTLLM_HAS_CUDA
class PyCudaRunner : public PyRunner {
 public:
  PyCudaRunner(const std::string& rank_file, std::int32_t num_blocks, const RunnerOptions& options)
      : PyRunner(make_runner(rank_file, options), num_blocks) {}
};
#endif

}  // namespace

void bind_runners(py::module_& module) {
  py::class_<PyRunner>(module, "Runner", "Steps of an engine without the manager: scoring, tests, benchmarks.")
      .def_property_readonly("vocab_size", [](const PyRunner& self) { return self.shape().vocab_size; })
      .def_property_readonly("tokens_per_block", [](const PyRunner& self) { return self.shape().tokens_per_block; })
      .def_property_readonly("max_seq_len", [](const PyRunner& self) { return self.shape().max_seq_len; })
      .def_property_readonly("max_num_tokens", [](const PyRunner& self) { return self.shape().max_num_tokens; })
      .def_property_readonly("num_blocks", &PyRunner::num_blocks)
      .def(
          "step", &PyRunner::step, py::arg("tokens"), py::arg("start_positions"), py::arg("block_tables"),
          py::arg("logits"), py::arg("adapters") = std::vector<AdapterId>{},
          "One step over several sequences; `logits` per sequence: none | last | all; `adapters` per sequence: id of a "
          "loaded adapter, 0 = none. Returns [rows, vocab_size].")
      .def("next_tokens", &PyRunner::next_tokens, py::arg("tokens"), py::arg("start_positions"),
           py::arg("block_tables"),
           "The most likely token behind each sequence, chosen where the logits are: no logits are given.")
      .def("load_adapter", &PyRunner::load_adapter, py::arg("adapter_id"), py::arg("adapter"))
      .def("unload_adapter", &PyRunner::unload_adapter, py::arg("adapter_id"))
      .def_property_readonly("adapter_bytes", &PyRunner::adapter_bytes);

  py::class_<PyCpuRunner, PyRunner>(module, "CpuRunner", "Runs engines of target cpu.")
      .def(py::init<const std::string&, std::int32_t, int, const std::string&>(), py::arg("rank_file"),
           py::arg("num_blocks"), py::arg("num_threads") = 0, py::arg("tactics") = "",
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("tactics_note", &PyCpuRunner::tactics_note,
                             "Why `tactics` are left aside; empty = they are not, or there are none.")
      .def("set_profiling", &PyCpuRunner::set_profiling, py::arg("on"),
           "Begins to take the times of ops, from zero, or ceases to.")
      .def("profile", &PyCpuRunner::profile,
           "Times since then, summed over steps and threads: steps, threads, seconds (of steps, not summed over "
           "threads) "
           "and for each kind and shape of op: op, shape, count (in a step), bytes (of its weights), prepare_seconds, "
           "compute_seconds, wait_seconds.");

#ifdef AOTLLM_HAS_CUDA
  py::class_<PyCudaRunner, PyRunner>(module, "CudaRunner", "Runs engines of target cuda.")
      .def(py::init([](const std::string& rank_file, std::int32_t num_blocks, int device, bool deterministic,
                       bool graphs, const std::string& cublaslt, const std::string& tactics,
                       const std::vector<int>& devices) {
             RunnerOptions options;
             options.device = device;
             options.devices = devices;
             options.deterministic = deterministic;
             options.graphs = graphs;
             options.cublaslt = cublaslt;
             options.tactics = tactics;
             return std::make_unique<PyCudaRunner>(rank_file, num_blocks, options);
           }),
           py::arg("rank_file"), py::arg("num_blocks"), py::arg("device") = 0, py::arg("deterministic") = false,
           py::arg("graphs") = true, py::arg("cublaslt") = "", py::arg("tactics") = "",
           py::arg("devices") = std::vector<int>{}, py::call_guard<py::gil_scoped_release>());
#endif
}

}  // namespace aotllm
