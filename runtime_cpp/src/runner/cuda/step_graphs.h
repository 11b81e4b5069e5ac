#pragma once

#include <cstdint>
#include <functional>
#include <map>

#include "comm/communicator.h"
#include "runner/cuda/pinned.h"
#include "runner/cuda/step_data.h"

namespace aotllm::cuda {

/// The CUDA graphs of a rank's steps, by shape. A shape that comes again is captured, so that one that does not costs
/// nothing; of more than `most` shapes that which has not come for longest is forgotten, and its graph with it. All of
/// that follows from the shapes alone: ranks, which run the same steps, make and replay the same graphs.
class StepGraphs {
 public:
  /// About a millisecond each
  static constexpr std::size_t kMost = 512;

  explicit StepGraphs(Communicator* ranks = nullptr, std::size_t most = kMost) : ranks_(ranks), most_(most) {}

  /// Puts into `stream` what `launch` launches there for steps of shape `key`, which is the same each time. Nothing
  /// else is captured that this thread does on the way.
  void run(const StepShape& key, cudaStream_t stream, const std::function<void()>& launch);

 private:
  struct Entry {
    OwnedGraph graph;  ///< empty until the shape comes again
    std::int64_t last_use = 0;
  };

  void forget_oldest();

  Communicator* ranks_;
  std::size_t most_;
  std::map<StepShape, Entry> entries_;
  std::int64_t uses_ = 0;
};

}  // namespace aotllm::cuda
