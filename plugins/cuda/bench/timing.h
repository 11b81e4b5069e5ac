#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "launch.h"

namespace aotllm::cuda {

/// Median seconds of one call of `work`, over replays of a CUDA graph of `calls` calls; `work(i, stream)` is call i,
/// which should rotate over data larger than the L2 (60 MB) where it is to come from memory. `sm` is that of the
/// stream.
inline double time_in_graph(int calls, const std::function<void(int, const Stream&)>& work, int replays = 15,
                            bool programmatic = true, int sm = 90) {
  cudaStream_t handle;
  check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "stream");
  const Stream stream{handle, programmatic && sm >= 90, sm};
  for (int i = 0; i < calls; ++i) work(i, {handle, false, sm});
  check(cudaStreamSynchronize(handle), "warm-up");
  check(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < calls; ++i) work(i, stream);
  cudaGraph_t graph;
  check(cudaStreamEndCapture(handle, &graph), "end of capture");
  cudaGraphExec_t exec;
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<double> seconds;
  for (int i = 0; i < replays + 3; ++i) {
    check(cudaEventRecord(begin, handle), "record");
    check(cudaGraphLaunch(exec, handle), "graph launch");
    check(cudaEventRecord(end, handle), "record");
    check(cudaEventSynchronize(end), "graph");
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 3) seconds.push_back(ms * 1e-3 / calls);
  }
  check(cudaGraphExecDestroy(exec), "destroy");
  check(cudaGraphDestroy(graph), "destroy");
  check(cudaEventDestroy(begin), "destroy");
  check(cudaEventDestroy(end), "destroy");
  check(cudaStreamDestroy(handle), "destroy");
  std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2), seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace aotllm::cuda
