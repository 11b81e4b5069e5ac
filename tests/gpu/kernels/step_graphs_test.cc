#include "runner/cuda/step_graphs.h"

#include <gtest/gtest.h>

#include "aotllm/errors.h"
#include "device_array.h"
#include "reference.h"

namespace aotllm::cuda {
namespace {

/// A "step" that fills one byte of device memory, and counts how often it was put into the stream by hand.
class Filling {
 public:
  explicit Filling(StepGraphs& graphs) : graphs_(graphs), bytes_(256) { bytes_.fill(0); }

  void run(int rows) {
    graphs_.run({.rows = rows}, stream_.handle(), [this, rows] {
      ++launches_;
      check(cudaMemsetAsync(bytes_.data() + rows, rows, 1, stream_.handle()), "fill");
    });
  }
  int launches() const { return launches_; }
  /// What is there now, which then is 0 again.
  int take(int rows) {
    std::uint8_t value = 0;
    check(cudaMemcpyAsync(&value, bytes_.data() + rows, 1, cudaMemcpyDeviceToHost, stream_.handle()), "copy");
    check(cudaMemsetAsync(bytes_.data() + rows, 0, 1, stream_.handle()), "fill");
    check(cudaStreamSynchronize(stream_.handle()), "copy");
    return value;
  }

 private:
  StepGraphs& graphs_;
  OwnedStream stream_;
  DeviceArray<std::uint8_t> bytes_;
  int launches_ = 0;
};

TEST(StepGraphs, AShapeIsLaunchedThenCapturedThenReplayed) {
  AOTLLM_NEEDS_GPU();
  StepGraphs graphs;
  Filling steps(graphs);
  for (const int launches : {1, 2, 2, 2}) {
    steps.run(7);
    EXPECT_EQ(steps.launches(), launches);
    EXPECT_EQ(steps.take(7), 7);
  }
  steps.run(8);
  EXPECT_EQ(steps.launches(), 3);
  EXPECT_EQ(steps.take(8), 8);
  EXPECT_EQ(steps.take(7), 0);
}

TEST(StepGraphs, TheOldestShapesAreForgotten) {
  AOTLLM_NEEDS_GPU();
  StepGraphs graphs(nullptr, 2);
  Filling steps(graphs);
  for (const int rows : {1, 1, 2, 2, 1, 3, 3}) steps.run(rows);  // 2 has gone, with its graph still to run
  EXPECT_EQ(steps.launches(), 6);
  for (const int rows : {1, 2, 3}) EXPECT_EQ(steps.take(rows), rows);
  steps.run(1);
  EXPECT_EQ(steps.launches(), 6);
  steps.run(2);
  EXPECT_EQ(steps.launches(), 7);
  EXPECT_EQ(steps.take(2), 2);
}

TEST(StepGraphs, AFailureEndsTheCapture) {
  AOTLLM_NEEDS_GPU();
  StepGraphs graphs;
  OwnedStream stream;
  Filling steps(graphs);
  const auto fail = [] { throw Error(ErrorKind::kInternal, "no"); };
  EXPECT_THROW(graphs.run({.rows = 1}, stream.handle(), fail), Error);
  EXPECT_THROW(graphs.run({.rows = 1}, stream.handle(), fail), Error);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  check(cudaStreamIsCapturing(stream.handle(), &status), "state of a stream");
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
}

}  // namespace
}  // namespace aotllm::cuda
