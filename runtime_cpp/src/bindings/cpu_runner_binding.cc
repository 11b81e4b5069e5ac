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
#include "bindings/bindings.h"
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

/// The runner behind a lock: steps release the GIL, and Python may call from several threads.
class PyCpuRunner {
 public:
  PyCpuRunner(const std::string& rank_file, std::int32_t num_blocks, int num_threads)
      : runner_(Engine::load(rank_file), {num_threads, nullptr}) {
    KvAllocation allocation;
    allocation.device_blocks.fill(num_blocks);
    runner_.allocate_kv(allocation);
  }

  const CpuRunner& runner() const noexcept { return runner_; }

  py::array_t<float> step(const std::vector<std::vector<TokenId>>& tokens,
                          const std::vector<std::int32_t>& start_positions,
                          const std::vector<std::vector<BlockId>>& block_tables, const std::vector<std::string>& logits,
                          const std::vector<AdapterId>& adapters) {
    check_length("start_positions", start_positions.size(), tokens.size());
    check_length("block_tables", block_tables.size(), tokens.size());
    check_length("logits", logits.size(), tokens.size());
    if (!adapters.empty()) check_length("adapters", adapters.size(), tokens.size());
    std::vector<SequenceStep> sequences;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      SequenceStep& sequence = sequences.emplace_back();
      sequence.tokens = tokens[i];
      sequence.start_position = start_positions[i];
      sequence.block_tables.fill(block_tables[i]);  // one table for all groups
      sequence.logits = parse_logits_mode(logits[i]);
      sequence.adapter = adapters.empty() ? 0 : adapters[i];
    }
    StepOutputs outputs;
    {
      const py::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      runner_.step(sequences, outputs);
    }
    return to_array(std::move(outputs));
  }

  void load_adapter(AdapterId id, const Adapter& adapter) {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    runner_.load_adapter(id, adapter);
  }

  void unload_adapter(AdapterId id) {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    runner_.unload_adapter(id);
  }

  std::int64_t adapter_bytes() {
    const py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return runner_.adapter_bytes();
  }

 private:
  CpuRunner runner_;
  std::mutex mutex_;
};

}  // namespace

void bind_cpu_runner(py::module_& module) {
  const auto shape = [](const PyCpuRunner& self) -> const ModelShape& { return self.runner().shape(); };
  py::class_<PyCpuRunner>(module, "CpuRunner", "Steps of an engine without the manager: scoring, tests, benchmarks.")
      .def(py::init<const std::string&, std::int32_t, int>(), py::arg("rank_file"), py::arg("num_blocks"),
           py::arg("num_threads") = 0, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("vocab_size", [=](const PyCpuRunner& self) { return shape(self).vocab_size; })
      .def_property_readonly("tokens_per_block", [=](const PyCpuRunner& self) { return shape(self).tokens_per_block; })
      .def_property_readonly("max_seq_len", [=](const PyCpuRunner& self) { return shape(self).max_seq_len; })
      .def_property_readonly("max_num_tokens", [=](const PyCpuRunner& self) { return shape(self).max_num_tokens; })
      .def_property_readonly("num_blocks",
                             [](const PyCpuRunner& self) { return self.runner().kv_allocation().device_blocks[0]; })
      .def(
          "step", &PyCpuRunner::step, py::arg("tokens"), py::arg("start_positions"), py::arg("block_tables"),
          py::arg("logits"), py::arg("adapters") = std::vector<AdapterId>{},
          "One step over several sequences; `logits` per sequence: none | last | all; `adapters` per sequence: id of a "
          "loaded adapter, 0 = none. Returns [rows, vocab_size].")
      .def("load_adapter", &PyCpuRunner::load_adapter, py::arg("adapter_id"), py::arg("adapter"))
      .def("unload_adapter", &PyCpuRunner::unload_adapter, py::arg("adapter_id"))
      .def_property_readonly("adapter_bytes", &PyCpuRunner::adapter_bytes);
}

}  // namespace aotllm
