#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/cpu_runner.h"
#include "aotllm/errors.h"
#include "aotllm/gpt_manager.h"
#include "bindings/bindings.h"

namespace aotllm {
namespace {

namespace py = pybind11;

/// The destructor waits for the loop, and other Python threads go on meanwhile.
struct DeleteWithoutGil {
  void operator()(GptManager* manager) const {
    const py::gil_scoped_release release;
    delete manager;
  }
};
using ManagerHolder = std::unique_ptr<GptManager, DeleteWithoutGil>;

/// Lets the GIL go itself: a call guard would cover pybind11's registration of the new object, too.
ManagerHolder make_manager(const std::string& rank_file, ManagerConfig config) {
  const py::gil_scoped_release release;
  auto runner = std::make_unique<CpuRunner>(Engine::load(rank_file), CpuRunnerOptions{config.num_threads, nullptr});
  return ManagerHolder(new GptManager(std::move(runner), std::move(config)));
}

/// Any 64 bits make a seed, signed (OpenAI) or not (KServe).
void set_seed(SamplingParams& params, const std::optional<py::int_>& seed) {
  if (!seed) {
    params.seed.reset();
    return;
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(seed->ptr(), &overflow);
  if (overflow == 0) {
    params.seed = value;
    return;
  }
  const unsigned long long bits = overflow > 0 ? PyLong_AsUnsignedLongLong(seed->ptr()) : 0;
  if (overflow < 0 || PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw Error(ErrorKind::kInvalidRequest,
                "seed is " + std::string(py::str(*seed)) + "; it must be in [-2^63, 2^64), or None", "seed");
  }
  params.seed = static_cast<std::int64_t>(bits);
}

/// The rows as arrays that share the response's memory and keep it alive.
py::list logits_of(const py::object& self) {
  auto& response = self.cast<Response&>();
  py::list rows;
  for (std::vector<float>& row : response.logits) {
    rows.append(py::array_t<float>(static_cast<py::ssize_t>(row.size()), row.data(), self));
  }
  return rows;
}

void bind_requests(py::module_& module) {
  py::class_<SamplingParams>(module, "SamplingParams", "How tokens are chosen; checked by GptManager.submit.")
      .def(py::init<>())
      .def_readwrite("max_tokens", &SamplingParams::max_tokens)
      .def_readwrite("temperature", &SamplingParams::temperature)
      .def_readwrite("top_k", &SamplingParams::top_k)
      .def_readwrite("top_p", &SamplingParams::top_p)
      .def_readwrite("min_p", &SamplingParams::min_p)
      .def_property(
          "seed", [](const SamplingParams& self) { return self.seed; }, &set_seed)
      .def_readwrite("stop_token_ids", &SamplingParams::stop_token_ids)
      .def_readwrite("ignore_eos", &SamplingParams::ignore_eos);

  py::class_<Request>(module, "Request", "One prompt to continue. Lists are copied: assign them, do not append.")
      .def(py::init<>())
      .def_readwrite("prompt_token_ids", &Request::prompt_token_ids)
      .def_readwrite("sampling", &Request::sampling)
      .def_readwrite("priority", &Request::priority)
      .def_readwrite("logprobs", &Request::logprobs)
      .def_readwrite("return_logits", &Request::return_logits);
}

void bind_responses(py::module_& module) {
  py::class_<TokenLogprobs>(module, "TokenLogprobs", "Log-probabilities under softmax(raw logits).")
      .def_readonly("token_id", &TokenLogprobs::token_id)
      .def_readonly("logprob", &TokenLogprobs::logprob)
      .def_readonly("top", &TokenLogprobs::top);

  py::class_<Response>(module, "Response", "News of one request after a step.")
      .def_readonly("request_id", &Response::request_id)
      .def_readonly("token_ids", &Response::token_ids)
      .def_readonly("logprobs", &Response::logprobs)
      .def_property_readonly("logits", &logits_of)
      .def_property_readonly("finish_reason",
                             [](const Response& self) {
                               return self.finish_reason ? std::optional(finish_reason_name(*self.finish_reason))
                                                         : std::nullopt;
                             })
      .def_readonly("stop_token_id", &Response::stop_token_id)
      .def_property_readonly("error_kind",
                             [](const Response& self) {
                               return self.error_kind ? std::optional(error_kind_name(*self.error_kind)) : std::nullopt;
                             })
      .def_property_readonly(
          "error_message",
          [](const Response& self) { return self.error_kind ? std::optional(self.error_message) : std::nullopt; })
      .def_readonly("num_prompt_tokens", &Response::num_prompt_tokens)
      .def_readonly("num_cached_tokens", &Response::num_cached_tokens);

  py::class_<Stats>(module, "Stats", "Counters since the start, and the state after the latest step.")
      .def_readonly("steps", &Stats::steps)
      .def_readonly("queued", &Stats::queued)
      .def_readonly("running", &Stats::running)
      .def_readonly("finished", &Stats::finished)
      .def_readonly("context_tokens", &Stats::context_tokens)
      .def_readonly("generated_tokens", &Stats::generated_tokens)
      .def_readonly("blocks_total", &Stats::blocks_total)
      .def_readonly("blocks_used", &Stats::blocks_used)
      .def_readonly("preemptions", &Stats::preemptions);
}

}  // namespace

void bind_manager(py::module_& module) {
  bind_requests(module);
  bind_responses(module);

  py::class_<ManagerConfig>(module, "ManagerConfig", "Limits of a manager; 0 takes the engine's.")
      .def(py::init<>())
      .def_readwrite("num_threads", &ManagerConfig::num_threads)
      .def_readwrite("num_kv_blocks", &ManagerConfig::num_kv_blocks)
      .def_readwrite("max_batch_size", &ManagerConfig::max_batch_size)
      .def_readwrite("max_num_tokens", &ManagerConfig::max_num_tokens)
      .def_readwrite("max_chunk_tokens", &ManagerConfig::max_chunk_tokens)
      .def_readwrite("max_queue_size", &ManagerConfig::max_queue_size)
      .def_readwrite("eos_token_ids", &ManagerConfig::eos_token_ids);

  // The loop's thread never takes the GIL; whoever waits for it lets the GIL go.
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  py::class_<GptManager, ManagerHolder>(
      module, "GptManager", "The in-flight-batching loop on a C++ thread of its own. All methods are thread-safe.")
      .def(py::init(&make_manager), py::arg("rank_file"), py::arg("config"))
      .def("submit", &GptManager::submit, py::arg("request"), ReleaseGil(),
           "Queues a request and returns its id. Raises InvalidRequest, ContextTooLong, Overloaded or Cancelled.")
      .def("cancel", &GptManager::cancel, py::arg("request_id"), ReleaseGil(),
           "Ends a request before the next step; no-op for a finished or unknown id.")
      .def(
          "poll", [](GptManager& self, double timeout) { return self.poll(std::chrono::duration<double>(timeout)); },
          py::arg("timeout"), ReleaseGil(),
          "All responses that are ready, in order; waits up to `timeout` seconds for the first one.")
      .def("stats", &GptManager::stats, ReleaseGil())
      .def("shutdown", &GptManager::shutdown, py::arg("drain") = false, ReleaseGil(),
           "Refuses new requests and ends the loop once all have finished (drain) or been cancelled. Idempotent.")
      .def_property_readonly("max_seq_len", &GptManager::max_seq_len)
      .def_property_readonly("vocab_size", &GptManager::vocab_size);
}

}  // namespace aotllm
