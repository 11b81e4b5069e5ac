#include "runner/cuda/step_graphs.h"

#include <algorithm>

namespace aotllm::cuda {
namespace {

OwnedGraph capture(cudaStream_t stream, const std::function<void()>& launch) {
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture of a graph");
  cudaGraph_t graph = nullptr;
  try {
    launch();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream, &graph), "capture of a graph");
  return OwnedGraph(graph);
}

}  // namespace

void StepGraphs::run(const StepShape& key, cudaStream_t stream, const std::function<void()>& launch) {
  const auto [it, is_new] = entries_.try_emplace(key);
  Entry& entry = it->second;
  entry.last_use = ++uses_;
  if (is_new) {
    if (entries_.size() > most_) forget_oldest();
    launch();
    return;
  }
  if (!entry.graph) {
    entry.graph = capture(stream, launch);
    if (ranks_ != nullptr) {  // which all make this graph now: nobody launches it while another allocates for it
      entry.graph.upload(stream);
      check(cudaStreamSynchronize(stream), "upload of a graph");
      ranks_->meet();
    }
  }
  entry.graph.launch(stream);
}

/// A graph that still runs is freed when it has ended.
void StepGraphs::forget_oldest() {
  const auto oldest = std::ranges::min_element(entries_, {}, [](const auto& entry) { return entry.second.last_use; });
  entries_.erase(oldest);
}

}  // namespace aotllm::cuda
