#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "aotllm/gpt_manager.h"
#include "aotllm/make_runner.h"
#include "bindings/bindings.h"
#include "runner/oracle_runner.h"
#include "support/strings.h"

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

/// A manager's config with what its draft proposer is made of.
struct PyManagerConfig : ManagerConfig {
  std::int32_t device = 0;
  std::vector<std::int32_t> devices;
  bool deterministic = false;
  std::string cublaslt;
  std::string tactics;

  std::string speculative = "none";
  std::int32_t ngram_min = 3;
  std::int32_t ngram_max = 4;
  std::string draft_rank_file;
};

/// Enumerations are strings in Python: each name with its value.
template <class T>
using Names = std::vector<std::pair<const char*, T>>;

const Names<CapacityPolicy> kCapacityPolicies = {{"max_utilization", CapacityPolicy::kMaxUtilization},
                                                 {"guaranteed_no_evict", CapacityPolicy::kGuaranteedNoEvict}};
const Names<QueuePolicy> kQueuePolicies = {{"priority", QueuePolicy::kPriority},
                                           {"fcfs", QueuePolicy::kFcfs},
                                           {"longest_prefix", QueuePolicy::kLongestPrefix}};

const Names<Pooling> kPoolings = {{"none", Pooling::kNone}, {"last", Pooling::kLast}, {"mean", Pooling::kMean}};

template <class T>
T parse_name(const char* param, const Names<T>& names, const std::string& name) {
  std::string allowed;
  for (const auto& [each, value] : names) {
    if (name == each) return value;
    allowed += cat(allowed.empty() ? "" : ", ", each);
  }
  throw Error(ErrorKind::kInvalidRequest, cat(param, " is \"", name, "\"; it must be one of ", allowed), param);
}

template <class T>
const char* name_of(const Names<T>& names, T value) {
  for (const auto& [each, its_value] : names) {
    if (its_value == value) return each;
  }
  return "";
}

/// KV blocks of a draft engine: as many sequences of full length as the manager may run, within the draft's own limits
/// and a tenth of the free memory.
std::int32_t draft_blocks(const ModelRunner& runner) {
  const ModelShape& draft = runner.shape();
  std::int64_t bytes_per_block = 0;
  for (const KvGroupShape& group : draft.kv_groups) bytes_per_block += group.bytes_per_block;
  const std::int64_t wanted =
      std::int64_t{(draft.max_seq_len + draft.tokens_per_block - 1) / draft.tokens_per_block} * draft.max_batch_size;
  const std::int64_t room =
      runner.free_memory().device_bytes.value_or(INT64_MAX) / 10 / std::max<std::int64_t>(bytes_per_block, 1);
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(std::min(wanted, room), 1, INT32_MAX));
}

RunnerOptions runner_options(const PyManagerConfig& config) {
  RunnerOptions options;
  options.num_threads = config.num_threads;
  options.device = config.device;
  options.devices = config.devices;
  options.deterministic = config.deterministic;
  options.cublaslt = config.cublaslt;
  options.tactics = config.tactics;
  return options;
}

std::unique_ptr<DraftProposer> make_proposer(const PyManagerConfig& config, const ModelShape& shape) {
  if (config.speculative == "none") return nullptr;
  if (config.num_speculative_tokens < 1) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("num_speculative_tokens is ", config.num_speculative_tokens, "; speculation needs at least 1"),
                "num_speculative_tokens");
  }
  if (config.speculative == "ngram") return make_ngram_proposer(config.ngram_min, config.ngram_max);
  if (config.speculative != "draft") {
    throw Error(ErrorKind::kInvalidRequest,
                cat("speculative is \"", config.speculative, "\"; it must be one of none, ngram, draft"),
                "speculative");
  }
  RunnerOptions options = runner_options(config);
  if (!options.devices.empty()) options.device = options.devices.front();
  options.devices.clear();  // the draft engine may have another number of ranks
  options.tactics.clear();  // they are the other engine's
  auto runner = make_runner(config.draft_rank_file, options);
  if (runner->shape().vocab_size != shape.vocab_size) {
    throw Error(ErrorKind::kEngineIncompatible,
                cat("the draft engine has ", runner->shape().vocab_size, " tokens and the engine ", shape.vocab_size,
                    "; they must have the same tokenizer"));
  }
  const std::int32_t num_blocks = draft_blocks(*runner);
  return make_engine_proposer(std::move(runner), num_blocks);
}

/// Lets the GIL go itself: a call guard would cover pybind11's registration of the new object, too.
ManagerHolder make_manager(const std::string& rank_file, const PyManagerConfig& config) {
  const py::gil_scoped_release release;
  auto runner = make_runner(rank_file, runner_options(config));
  auto proposer = make_proposer(config, runner->shape());
  return ManagerHolder(new GptManager(std::move(runner), config, std::move(proposer)));
}

/// Fills in what of `options` follows from the rest. End tokens are never said unless they are asked for.
ManagerHolder make_oracle_manager(const PyManagerConfig& config, OracleOptions options,
                                  const std::vector<std::int32_t>& kv_windows, std::int64_t kv_bytes_per_token) {
  const py::gil_scoped_release release;
  ModelShape& shape = options.shape;
  for (const std::int32_t window : kv_windows) {
    shape.kv_groups.push_back({window, shape.tokens_per_block * kv_bytes_per_token});
  }
  if (options.spoken_tokens.empty()) {
    const std::vector<TokenId>& end = config.eos_token_ids;
    for (TokenId token = 0; token < shape.vocab_size; ++token) {
      if (std::find(end.begin(), end.end(), token) == end.end()) options.spoken_tokens.push_back(token);
    }
  }
  auto runner = std::make_unique<OracleRunner>(std::move(options));
  auto proposer = make_proposer(config, runner->shape());
  return ManagerHolder(new GptManager(std::move(runner), config, std::move(proposer)));
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

/// Likewise; None where there is none.
py::object embedding_of(const py::object& self) {
  auto& response = self.cast<Response&>();
  if (response.embedding.empty()) return py::none();
  return py::array_t<float>(static_cast<py::ssize_t>(response.embedding.size()), response.embedding.data(), self);
}

void bind_requests(py::module_& module) {
  py::class_<SamplingParams>(module, "SamplingParams", "How tokens are chosen; checked by GptManager.submit.")
      .def(py::init<>())
      .def_readwrite("max_tokens", &SamplingParams::max_tokens)
      .def_readwrite("temperature", &SamplingParams::temperature)
      .def_readwrite("top_k", &SamplingParams::top_k)
      .def_readwrite("top_p", &SamplingParams::top_p)
      .def_readwrite("min_p", &SamplingParams::min_p)
      .def_readwrite("typical_p", &SamplingParams::typical_p)
      .def_readwrite("repetition_penalty", &SamplingParams::repetition_penalty)
      .def_readwrite("presence_penalty", &SamplingParams::presence_penalty)
      .def_readwrite("frequency_penalty", &SamplingParams::frequency_penalty)
      .def_readwrite("no_repeat_ngram_size", &SamplingParams::no_repeat_ngram_size)
      .def_readwrite("logit_bias", &SamplingParams::logit_bias)
      .def_readwrite("allowed_token_ids", &SamplingParams::allowed_token_ids)
      .def_readwrite("bad_words", &SamplingParams::bad_words)
      .def_readwrite("min_tokens", &SamplingParams::min_tokens)
      .def_property(
          "seed", [](const SamplingParams& self) { return self.seed; }, &set_seed)
      .def_readwrite("stop_token_ids", &SamplingParams::stop_token_ids)
      .def_readwrite("ignore_eos", &SamplingParams::ignore_eos);

  py::class_<Request>(module, "Request", "One prompt to continue. Lists are copied: assign them, do not append.")
      .def(py::init<>())
      .def_readwrite("prompt_token_ids", &Request::prompt_token_ids)
      .def_readwrite("sampling", &Request::sampling)
      .def_readwrite("n", &Request::n)
      .def_readwrite("priority", &Request::priority)
      .def_readwrite("timeout", &Request::timeout)
      .def_readwrite("cache_salt", &Request::cache_salt)
      .def_readwrite("retention_priority", &Request::retention_priority)
      .def_readwrite("adapter", &Request::adapter)
      .def_readwrite("prompt_logprobs", &Request::prompt_logprobs)
      .def_property(
          "pooling", [](const Request& self) { return name_of(kPoolings, self.pooling); },
          [](Request& self, const std::string& name) { self.pooling = parse_name("pooling", kPoolings, name); })
      .def_readwrite("logprobs", &Request::logprobs)
      .def_readwrite("return_logits", &Request::return_logits)
      .def_property("constraint", nullptr, [](Request& self, const Constraint* constraint) {
        // A clone: what Python does to its own later stays out of the request.
        self.constraint = constraint != nullptr ? constraint->clone() : nullptr;
      });
}

void bind_responses(py::module_& module) {
  py::class_<TokenLogprobs>(module, "TokenLogprobs", "Log-probabilities under softmax(raw logits).")
      .def_readonly("token_id", &TokenLogprobs::token_id)
      .def_readonly("logprob", &TokenLogprobs::logprob)
      .def_readonly("top", &TokenLogprobs::top);

  py::class_<SequenceTimings>(module, "SequenceTimings", "Seconds from submit.")
      .def_readonly("queue_seconds", &SequenceTimings::queue_seconds)
      .def_readonly("first_token_seconds", &SequenceTimings::first_token_seconds)
      .def_readonly("total_seconds", &SequenceTimings::total_seconds);

  py::class_<Response>(module, "Response", "News of one sequence of a request after a step.")
      .def_readonly("request_id", &Response::request_id)
      .def_readonly("sequence_index", &Response::sequence_index)
      .def_readonly("prompt_logprobs", &Response::prompt_logprobs)
      .def_property_readonly(
          "timings",
          [](const Response& self) { return self.finish_reason ? std::optional(self.timings) : std::nullopt; })
      .def_readonly("num_preemptions", &Response::num_preemptions)
      .def_readonly("num_draft_tokens", &Response::num_draft_tokens)
      .def_readonly("num_accepted_tokens", &Response::num_accepted_tokens)
      .def_readonly("token_ids", &Response::token_ids)
      .def_readonly("logprobs", &Response::logprobs)
      .def_property_readonly("logits", &logits_of)
      .def_property_readonly("embedding", &embedding_of)
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
}

void bind_config(py::module_& module) {
  py::class_<PyManagerConfig>(module, "ManagerConfig", "Limits of a manager; 0 takes the engine's.")
      .def(py::init<>())
      .def_readwrite("num_threads", &PyManagerConfig::num_threads)
      .def_readwrite("device", &PyManagerConfig::device)
      .def_readwrite("devices", &PyManagerConfig::devices)
      .def_readwrite("deterministic", &PyManagerConfig::deterministic)
      .def_readwrite("cublaslt", &PyManagerConfig::cublaslt)
      .def_readwrite("tactics", &PyManagerConfig::tactics)
      .def_readwrite("num_kv_blocks", &PyManagerConfig::num_kv_blocks)
      .def_readwrite("kv_cache_tokens", &PyManagerConfig::kv_cache_tokens)
      .def_readwrite("kv_cache_bytes", &PyManagerConfig::kv_cache_bytes)
      .def_readwrite("kv_cache_fraction", &PyManagerConfig::kv_cache_fraction)
      .def_readwrite("kv_host_bytes", &PyManagerConfig::kv_host_bytes)
      .def_readwrite("max_batch_size", &PyManagerConfig::max_batch_size)
      .def_readwrite("max_num_tokens", &PyManagerConfig::max_num_tokens)
      .def_readwrite("max_chunk_tokens", &PyManagerConfig::max_chunk_tokens)
      .def_property(
          "capacity_policy",
          [](const PyManagerConfig& self) { return name_of(kCapacityPolicies, self.capacity_policy); },
          [](PyManagerConfig& self, const std::string& name) {
            self.capacity_policy = parse_name("capacity_policy", kCapacityPolicies, name);
          })
      .def_property(
          "queue_policy", [](const PyManagerConfig& self) { return name_of(kQueuePolicies, self.queue_policy); },
          [](PyManagerConfig& self, const std::string& name) {
            self.queue_policy = parse_name("queue_policy", kQueuePolicies, name);
          })
      .def_readwrite("max_wait_steps", &PyManagerConfig::max_wait_steps)
      .def_readwrite("max_queue_size", &PyManagerConfig::max_queue_size)
      .def_readwrite("max_queued_tokens", &PyManagerConfig::max_queued_tokens)
      .def_readwrite("enable_prefix_caching", &PyManagerConfig::enable_prefix_caching)
      .def_readwrite("max_kv_events", &PyManagerConfig::max_kv_events)
      .def_readwrite("num_speculative_tokens", &PyManagerConfig::num_speculative_tokens)
      .def_readwrite("speculative", &PyManagerConfig::speculative)
      .def_readwrite("ngram_min", &PyManagerConfig::ngram_min)
      .def_readwrite("ngram_max", &PyManagerConfig::ngram_max)
      .def_readwrite("draft_rank_file", &PyManagerConfig::draft_rank_file)
      .def_readwrite("stuck_step_seconds", &PyManagerConfig::stuck_step_seconds)
      .def_readwrite("eos_token_ids", &PyManagerConfig::eos_token_ids);
}

}  // namespace

void bind_manager(py::module_& module) {
  bind_requests(module);
  bind_responses(module);

  bind_config(module);

  // The loop's thread never takes the GIL; whoever waits for it lets the GIL go.
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  py::class_<GptManager, ManagerHolder>(
      module, "GptManager", "The in-flight-batching loop on a C++ thread of its own. All methods are thread-safe.")
      .def(py::init(&make_manager), py::arg("rank_file"), py::arg("config"))
      .def_static(
          "with_oracle_runner",
          [](const PyManagerConfig& config, std::int32_t vocab_size, std::int32_t max_seq_len,
             std::int32_t max_batch_size, std::int32_t max_num_tokens, std::int32_t tokens_per_block,
             std::int32_t hidden_size, const std::vector<std::int32_t>& kv_windows, std::int64_t kv_bytes_per_token,
             std::vector<TokenId> spoken_tokens, double step_seconds) {
            const ModelShape shape{.vocab_size = vocab_size,
                                   .hidden_size = hidden_size,
                                   .num_layers = 1,
                                   .max_seq_len = max_seq_len,
                                   .max_num_tokens = max_num_tokens,
                                   .max_batch_size = max_batch_size,
                                   .tokens_per_block = tokens_per_block};
            return make_oracle_manager(config, {shape, std::move(spoken_tokens), step_seconds}, kv_windows,
                                       kv_bytes_per_token);
          },
          py::arg("config"), py::kw_only(), py::arg("vocab_size"), py::arg("max_seq_len"), py::arg("max_batch_size"),
          py::arg("max_num_tokens"), py::arg("tokens_per_block"), py::arg("hidden_size"), py::arg("kv_windows"),
          py::arg("kv_bytes_per_token"), py::arg("spoken_tokens"), py::arg("step_seconds"),
          "A manager over a model that computes nothing: its next token is a function of the last one and its "
          "position.")
      .def("submit", &GptManager::submit, py::arg("request"), ReleaseGil(),
           "Queues a request and returns its id. Raises InvalidRequest, ContextTooLong, Overloaded or Cancelled.")
      .def("cancel", &GptManager::cancel, py::arg("request_id"), py::arg("sequence_index") = -1, ReleaseGil(),
           "Ends a request, or one sequence of it, before the next step; no-op for a finished or unknown one.")
      .def(
          "poll", [](GptManager& self, double timeout) { return self.poll(std::chrono::duration<double>(timeout)); },
          py::arg("timeout"), ReleaseGil(),
          "All responses that are ready, in order; waits up to `timeout` seconds for the first one.")
      .def("stats", &GptManager::stats, ReleaseGil())
      .def("step_stats", &GptManager::step_stats, ReleaseGil(), "The steps since the last call, at most 1024.")
      .def("kv_events", &GptManager::kv_events, ReleaseGil(), "Events of the prefix tree since the last call.")
      .def("memory", &GptManager::memory)
      .def("clear_prefix_cache", &GptManager::clear_prefix_cache, ReleaseGil(),
           "Forgets all cached prefixes before the next step.")
      .def("load_adapter", &GptManager::load_adapter, py::arg("adapter_id"), py::arg("adapter"), ReleaseGil(),
           "Makes an adapter available to requests. Raises InvalidRequest where it does not fit the model.")
      .def("unload_adapter", &GptManager::unload_adapter, py::arg("adapter_id"), ReleaseGil(),
           "No request may name it any more; it is freed once none uses it. No-op for an unknown id.")
      .def("shutdown", &GptManager::shutdown, py::arg("drain") = false, ReleaseGil(),
           "Refuses new requests and ends the loop once all have finished (drain) or been cancelled. Idempotent.")
      .def_property_readonly("tactics_note", &GptManager::tactics_note,
                             "Why the engine's tactics.json is left aside; empty = it is not, or there is none.")
      .def_property_readonly("max_seq_len", &GptManager::max_seq_len)
      .def_property_readonly("vocab_size", &GptManager::vocab_size);
}

}  // namespace aotllm
