#include <algorithm>
#include <cstdint>
#include <set>
#include <string>

#include "aotllm/errors.h"
#include "comm/communicator.h"
#include "comm/host_word.h"
#include "comm/peer_kernels.h"
#include "comm/rendezvous.h"
#include "device_array.h"

// Why nothing waits for ever where ranks share a device. A kernel that waits (kSharedPeerBlocks blocks a rank) leaves
// most multiprocessors free, so the others' kernels find room; no kernel but these waits for another stream's; and they
// are launched without programmatic launch, so that no successor sits on a multiprocessor before its time. What remains
// is the host: a kernel's first launch may wait for all work of the device, hence for a rank that waits for the very
// thread that launches. So outside graphs the ranks meet on the host before each such kernel, when all that precedes it
// is launched, and each waits for it to end before it launches more. Graphs are made before the ranks meet, and then
// launch nothing new. (Streams that share one of the driver's queues would also wait for each other inside graphs:
// CUDA_DEVICE_MAX_CONNECTIONS must not be below the number of ranks on a device; 8 is the default, make_runner asks
// for 32.)
namespace aotllm::cuda {
namespace {

/// Partial sums of more bytes than this are worth a second wait.
constexpr std::int64_t kTwoShotBytes = 256 << 10;

/// What the ends share.
struct Shared {
  explicit Shared(const std::vector<int>& devices)
      : rendezvous(static_cast<int>(devices.size())),
        shares_device(std::set<int>(devices.begin(), devices.end()).size() < devices.size()) {}

  Rendezvous rendezvous;
  HostWord aborted;
  const bool shares_device;
  std::vector<DeviceArray<__nv_bfloat16>> staging;
  std::vector<DeviceArray<std::uint32_t>> flags;
  std::vector<DeviceArray<std::uint32_t>> calls;
  DeviceArray<float> gathered;
};

class PeerCommunicator final : public Communicator {
 public:
  PeerCommunicator(std::shared_ptr<Shared> shared, const PeerView& view)
      : shared_(std::move(shared)), view_(view), gathered_floats_(shared_->gathered.size()) {}

  int rank() const noexcept override { return view_.rank; }
  int size() const noexcept override { return view_.size; }

  void all_reduce(const AllReduceArgs& args, const Stream& stream) override {
    const std::int64_t elements = std::int64_t{args.rows} * args.width;
    if (args.width % 8 != 0 || elements > static_cast<std::int64_t>(view_.capacity)) {
      throw Error(ErrorKind::kInternal, "all_reduce: rows " + std::to_string(args.rows) + " of width " +
                                            std::to_string(args.width) + ", more than was reserved");
    }
    if (args.norm != nullptr) {
      run(stream, [&](const Stream& joined) { peer_all_reduce_norm(view_, args, *args.norm, joined); });
      return;
    }
    const bool two_shots = view_.size > 2 && 2 * elements > kTwoShotBytes;
    run(stream, [&](const Stream& joined) { peer_all_reduce(view_, args, two_shots, joined); });
  }

  bool takes_norm(int rows, int width) const noexcept override {
    return std::int64_t{2} * rows * width <= kTwoShotBytes && width <= kMaxNormWidth;
  }

  void gather(const GatherArgs& args, const Stream& stream) override {
    const std::int64_t floats = std::int64_t{args.rows} * args.columns * view_.size;
    if (args.columns % 4 != 0 || floats > static_cast<std::int64_t>(gathered_floats_)) {
      throw Error(ErrorKind::kInternal, "gather: rows " + std::to_string(args.rows) + " of " +
                                            std::to_string(args.columns) + " columns, more than was reserved");
    }
    run(stream, [&](const Stream& joined) { peer_gather(view_, args, joined); });
  }

  float* gathered() const noexcept override { return view_.rank == 0 ? view_.gathered : nullptr; }
  void meet() override { shared_->rendezvous.meet(); }
  bool shares_device() const noexcept override { return shared_->shares_device; }

  void abort() noexcept override {
    shared_->aborted.set(1);
    shared_->rendezvous.abort();
  }

 private:
  template <class Launch>
  void run(const Stream& stream, Launch&& launch) {
    if (!shared_->shares_device) return launch(stream);
    const Stream alone{stream.handle, false};
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream.handle, &status), "state of a stream");
    if (status != cudaStreamCaptureStatusNone) return launch(alone);
    meet();
    launch(alone);
    check(cudaStreamSynchronize(stream.handle), "exchange of ranks");
  }

  std::shared_ptr<Shared> shared_;
  PeerView view_;
  std::size_t gathered_floats_;
};

void enable_peer_access(const std::vector<int>& devices) {
  const std::set<int> distinct(devices.begin(), devices.end());
  for (const int from : distinct) {
    check(cudaSetDevice(from), "choice of the device");
    for (const int to : distinct) {
      if (from == to) continue;
      const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();  // is no failure, but would be found as one later
      } else {
        check(status, "access to a peer's memory");
      }
    }
  }
}

template <class T>
DeviceArray<T> zeros(std::size_t size) {
  DeviceArray<T> array(size);
  array.fill(0);
  return array;
}

}  // namespace

bool have_peer_access(const std::vector<int>& devices) {
  for (const int from : devices) {
    for (const int to : devices) {
      int possible = 1;
      if (from != to) check(cudaDeviceCanAccessPeer(&possible, from, to), "access to a peer's memory");
      if (possible == 0) return false;
    }
  }
  return true;
}

Communicators make_peer_communicators(const std::vector<int>& devices, const CommunicatorLimits& limits) {
  const int size = static_cast<int>(devices.size());
  if (size < 2 || size > kMaxPeerRanks) {
    throw Error(ErrorKind::kEngineIncompatible, "ranks that read each other's memory are 2 to " +
                                                    std::to_string(kMaxPeerRanks) + ", got " + std::to_string(size));
  }
  int current = 0;
  check(cudaGetDevice(&current), "current device");
  enable_peer_access(devices);
  auto shared = std::make_shared<Shared>(devices);
  PeerView view;
  view.capacity = (limits.elements + 7) / 8 * 8;
  view.size = size;
  view.blocks = shared->shares_device ? kSharedPeerBlocks : kMaxPeerBlocks;
  view.aborted = shared->aborted.device();
  for (int rank = 0; rank < size; ++rank) {
    check(cudaSetDevice(devices[static_cast<std::size_t>(rank)]), "choice of the device");
    load_peer_kernels(size);
    load_peer_norm_kernels(size);
    view.staging[rank] = shared->staging.emplace_back(2 * view.capacity).data();
    view.flags[rank] = shared->flags.emplace_back(zeros<std::uint32_t>(kPeerFlags)).data();
    shared->calls.push_back(zeros<std::uint32_t>(kMaxPeerBlocks));
    if (rank == 0) shared->gathered = zeros<float>(limits.gathered_floats);
    check(cudaDeviceSynchronize(), "memory of the ranks");  // before peers write here
  }
  view.gathered = shared->gathered.data();
  Communicators ends;
  for (view.rank = 0; view.rank < size; ++view.rank) {
    view.calls = shared->calls[static_cast<std::size_t>(view.rank)].data();
    ends.push_back(std::make_unique<PeerCommunicator>(shared, view));
  }
  check(cudaSetDevice(current), "choice of the device");
  return ends;
}

Communicators make_communicators(const std::vector<int>& devices, const CommunicatorLimits& limits) {
  if (static_cast<int>(devices.size()) <= kMaxPeerRanks && have_peer_access(devices)) {
    return make_peer_communicators(devices, limits);
  }
  return make_nccl_communicators(devices, limits);
}

}  // namespace aotllm::cuda
