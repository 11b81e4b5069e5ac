#pragma once

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "runner/cuda/pinned.h"

namespace aotllm::cuda {

/// The way of the residual stream from a rank to the one of the same place in the next stage of a pipeline, which has a
/// thread, a stream and perhaps a device of its own. Streams wait for each other by events; threads only until the
/// other one has put the event that they need into its stream. So a stage can begin a step while the next one is at the
/// step before: it waits no sooner than where it writes what the other still reads.
class StageLink {
 public:
  /// `to` is the receiver's buffer. `holds_thread`: the receiver's thread waits for the rows, too. So it must be where
  /// ranks wait for each other inside kernels and stages share a device: to load a kernel or to make a graph may wait
  /// for all work of the device, and keep a rank of the stage before from launching what the others wait for.
  StageLink(int sender_device, int receiver_device, void* to, bool holds_thread);

  /// The sender: copies `bytes` at `from` once all before is done in `stream`, and the receiver has released the step
  /// before. Throws Error(kInternal) after `abort`.
  void send(const void* from, std::size_t bytes, cudaStream_t stream);
  /// The receiver: what follows in `stream` finds the step's rows. Throws likewise.
  void receive(cudaStream_t stream);
  /// The receiver, once in each step: what is in `stream` is the last that reads them.
  void release(cudaStream_t stream);
  /// Ends all waiting of threads, now and later.
  void abort() noexcept;

 private:
  /// Waits until `count` is `steps`.
  void wait_for(const std::int64_t& count, std::int64_t steps);
  void advance(std::int64_t& count);

  const int sender_device_;
  const int receiver_device_;
  void* const to_;
  const bool holds_thread_;
  OwnedEvent sent_event_;
  OwnedEvent released_event_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t sent_ = 0;      ///< steps whose event is in the sender's stream
  std::int64_t released_ = 0;  ///< likewise, in the receiver's
  bool aborted_ = false;
};

}  // namespace aotllm::cuda
