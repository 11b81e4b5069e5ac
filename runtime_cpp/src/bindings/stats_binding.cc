#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "aotllm/gpt_manager.h"
#include "aotllm/kv_event.h"
#include "aotllm/stats.h"
#include "bindings/bindings.h"

namespace aotllm {
namespace {

namespace py = pybind11;

const char* tier_name(KvTier tier) {
  return tier == KvTier::kDevice ? "device" : "host";
}

void bind_counters(py::module_& module) {
  py::class_<StepStats>(module, "StepStats", "One step.")
      .def_readonly("step", &StepStats::step)
      .def_readonly("latency_seconds", &StepStats::latency_seconds)
      .def_readonly("run_seconds", &StepStats::run_seconds)
      .def_readonly("scheduled", &StepStats::scheduled)
      .def_readonly("queued", &StepStats::queued)
      .def_readonly("paused", &StepStats::paused)
      .def_readonly("preempted", &StepStats::preempted)
      .def_readonly("context_tokens", &StepStats::context_tokens)
      .def_readonly("generation_tokens", &StepStats::generation_tokens)
      .def_readonly("planned_ahead", &StepStats::planned_ahead);

  py::class_<KvCacheStats>(module, "KvCacheStats", "Counters of the KV cache since the start.")
      .def_readonly("queried_tokens", &KvCacheStats::queried_tokens)
      .def_readonly("hit_tokens", &KvCacheStats::hit_tokens)
      .def_readonly("stored_blocks", &KvCacheStats::stored_blocks)
      .def_readonly("reused_blocks", &KvCacheStats::reused_blocks)
      .def_readonly("evicted_blocks", &KvCacheStats::evicted_blocks)
      .def_readonly("offloaded_blocks", &KvCacheStats::offloaded_blocks)
      .def_readonly("onloaded_blocks", &KvCacheStats::onloaded_blocks)
      .def_readonly("copied_blocks", &KvCacheStats::copied_blocks);

  py::class_<Stats>(module, "Stats", "Counters since the start, and the state after the latest step.")
      .def_readonly("steps", &Stats::steps)
      .def_readonly("steps_planned_ahead", &Stats::steps_planned_ahead)
      .def_readonly("steps_queued", &Stats::steps_queued)
      .def_readonly("queued", &Stats::queued)
      .def_readonly("running", &Stats::running)
      .def_readonly("finished", &Stats::finished)
      .def_readonly("timed_out", &Stats::timed_out)
      .def_readonly("failed", &Stats::failed)
      .def_readonly("context_tokens", &Stats::context_tokens)
      .def_readonly("generated_tokens", &Stats::generated_tokens)
      .def_readonly("forced_tokens", &Stats::forced_tokens)
      .def_readonly("draft_tokens", &Stats::draft_tokens)
      .def_readonly("accepted_tokens", &Stats::accepted_tokens)
      .def_readonly("preemptions", &Stats::preemptions)
      .def_readonly("stuck_steps", &Stats::stuck_steps)
      .def_readonly("blocks_total", &Stats::blocks_total)
      .def_readonly("blocks_used", &Stats::blocks_used)
      .def_readonly("blocks_cached", &Stats::blocks_cached)
      .def_readonly("host_blocks_used", &Stats::host_blocks_used)
      .def_readonly("cache", &Stats::cache)
      .def_readonly("last_step", &Stats::last_step)
      .def_property_readonly("hit_rate", &Stats::hit_rate);
}

}  // namespace

void bind_stats(py::module_& module) {
  bind_counters(module);

  py::class_<KvMemory::Group>(module, "KvGroupMemory", "Layers with the same window.")
      .def_readonly("window", &KvMemory::Group::window)
      .def_readonly("bytes_per_block", &KvMemory::Group::bytes_per_block)
      .def_readonly("device_blocks", &KvMemory::Group::device_blocks)
      .def_readonly("host_blocks", &KvMemory::Group::host_blocks);

  py::class_<KvMemory>(module, "KvMemory", "What the KV memory buys.")
      .def_readonly("groups", &KvMemory::groups)
      .def_readonly("tokens_per_block", &KvMemory::tokens_per_block)
      .def_readonly("max_seq_len", &KvMemory::max_seq_len)
      .def_readonly("tokens", &KvMemory::tokens)
      .def_readonly("sequences_at_max_len", &KvMemory::sequences_at_max_len)
      .def_readonly("device_bytes", &KvMemory::device_bytes)
      .def_readonly("host_bytes", &KvMemory::host_bytes);

  py::class_<KvEvent>(module, "KvEvent", "News of the prefix tree.")
      .def_property_readonly("kind", [](const KvEvent& self) { return kv_event_kind_name(self.kind); })
      .def_readonly("id", &KvEvent::id)
      .def_readonly("key", &KvEvent::key)
      .def_readonly("parent_key", &KvEvent::parent_key)
      .def_readonly("group", &KvEvent::group)
      .def_property_readonly("tier", [](const KvEvent& self) { return tier_name(self.tier); })
      .def_property_readonly("adapter", [](const KvEvent& self) { return self.realm.adapter; })
      .def_readonly("tokens", &KvEvent::tokens);
}

}  // namespace aotllm
