#include <algorithm>
#include <atomic>
#include <set>

#include "aotllm/errors.h"
#include "comm/communicator.h"
#include "comm/nccl_library.h"
#include "comm/rendezvous.h"
#include "comm/sum_slices.h"
#include "device_array.h"

namespace aotllm::cuda {
namespace {

/// That go over a connection to make it.
constexpr std::size_t kConnectBytes = 1024;

/// The communicators of all ranks, which end together.
struct Group {
  Group(const std::vector<int>& devices, const std::string& path)
      : library(path), rendezvous(static_cast<int>(devices.size())), comms(devices.size()) {
    library.check(library.functions().comm_init_all(comms.data(), static_cast<int>(devices.size()), devices.data()),
                  "ncclCommInitAll");
  }
  ~Group() {
    if (aborted) return;  // they are gone
    for (const nccl::Comm comm : comms) library.functions().comm_destroy(comm);
  }

  NcclLibrary library;
  Rendezvous rendezvous;
  std::vector<nccl::Comm> comms;
  std::atomic<bool> aborted = false;
};

/// NCCL's own sums round in between, in an order that is its own, so it only carries: every rank sums a slice of all
/// partials, in float32 and in order, and all ranks gather the slices.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<Group> group, int rank, const CommunicatorLimits& limits)
      : group_(std::move(group)), rank_(rank), size_(static_cast<int>(group_->comms.size())) {
    const auto stride = static_cast<std::size_t>(slice_vectors(static_cast<std::int64_t>(limits.elements + 7) / 8));
    addends_ = DeviceArray<__nv_bfloat16>(stride * 8 * static_cast<std::size_t>(size_));
    sums_ = DeviceArray<__nv_bfloat16>(addends_.size());
    if (rank == 0) {
      columns_ = DeviceArray<float>(limits.gathered_floats);
      gathered_ = DeviceArray<float>(limits.gathered_floats);
    }
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  void all_reduce(const AllReduceArgs& args, const Stream& stream) override {
    const std::int64_t vectors = std::int64_t{args.rows} * (args.width / 8);
    const std::int64_t stride = slice_vectors(vectors);
    if (args.width % 8 != 0 ||
        static_cast<std::size_t>(stride) * 8 * static_cast<std::size_t>(size_) > addends_.size()) {
      throw Error(ErrorKind::kInternal, "all_reduce: more than was reserved");
    }
    const auto begin = [&](int rank) { return std::min(vectors, rank * stride); };
    const auto bytes = [&](int rank) {
      return static_cast<std::size_t>(begin(rank + 1) - begin(rank)) * sizeof(uint4);
    };
    const nccl::Functions& f = group_->library.functions();
    check(f.group_start(), "ncclGroupStart");
    for (int peer = 0; peer < size_; ++peer) {
      if (bytes(peer) > 0) {
        check(f.send(args.partial + begin(peer) * 8, bytes(peer), nccl::kUint8, peer, comm(), stream.handle),
              "ncclSend");
      }
      if (bytes(rank_) > 0) {
        check(f.recv(addends_.data() + peer * stride * 8, bytes(rank_), nccl::kUint8, peer, comm(), stream.handle),
              "ncclRecv");
      }
    }
    check(f.group_end(), "ncclGroupEnd");
    __nv_bfloat16* mine = sums_.data() + rank_ * stride * 8;
    const Stream plain{stream.handle, false};
    sum_slices({addends_.data(), stride, begin(rank_), begin(rank_ + 1) - begin(rank_), size_, mine}, args, plain);
    check(f.all_gather(mine, sums_.data(), static_cast<std::size_t>(stride) * sizeof(uint4), nccl::kUint8, comm(),
                       stream.handle),
          "ncclAllGather");
    cuda::check(cudaMemcpyAsync(args.out, sums_.data(), static_cast<std::size_t>(vectors) * sizeof(uint4),
                                cudaMemcpyDeviceToDevice, stream.handle),
                "copy of a sum");
  }

  void gather(const GatherArgs& args, const Stream& stream) override {
    const std::size_t part = static_cast<std::size_t>(args.rows) * static_cast<std::size_t>(args.columns);
    const nccl::Functions& f = group_->library.functions();
    check(f.group_start(), "ncclGroupStart");
    check(f.send(args.part, part * sizeof(float), nccl::kUint8, 0, comm(), stream.handle), "ncclSend");
    for (int peer = 0; rank_ == 0 && peer < size_; ++peer) {
      check(f.recv(columns_.data() + static_cast<std::size_t>(peer) * part, part * sizeof(float), nccl::kUint8, peer,
                   comm(), stream.handle),
            "ncclRecv");
    }
    check(f.group_end(), "ncclGroupEnd");
    const std::size_t width = static_cast<std::size_t>(args.columns) * sizeof(float);
    for (int peer = 0; rank_ == 0 && peer < size_; ++peer) {
      cuda::check(cudaMemcpy2DAsync(gathered_.data() + peer * args.columns, width * static_cast<std::size_t>(size_),
                                    columns_.data() + static_cast<std::size_t>(peer) * part, width, width,
                                    static_cast<std::size_t>(args.rows), cudaMemcpyDeviceToDevice, stream.handle),
                  "copy of logits");
    }
  }

  float* gathered() const noexcept override { return gathered_.data(); }
  void meet() override { group_->rendezvous.meet(); }
  bool shares_device() const noexcept override { return false; }

  void abort() noexcept override {
    group_->rendezvous.abort();
    if (group_->aborted.exchange(true)) return;
    for (const nccl::Comm each : group_->comms) group_->library.functions().comm_abort(each);
  }

 private:
  std::int64_t slice_vectors(std::int64_t vectors) const { return (vectors + size_ - 1) / size_; }
  nccl::Comm comm() const { return group_->comms[static_cast<std::size_t>(rank_)]; }
  void check(nccl::Result result, const char* what) const { group_->library.check(result, what); }

  std::shared_ptr<Group> group_;
  int rank_;
  int size_;
  DeviceArray<__nv_bfloat16> addends_;  ///< [size, slice]: of each rank, this rank's slice
  DeviceArray<__nv_bfloat16> sums_;     ///< [size, slice]
  DeviceArray<float> columns_;          ///< rank 0: [size, rows, columns]
  DeviceArray<float> gathered_;
};

/// NCCL makes a connection when it is first used, which fails while a stream is captured: so each is used once now.
void connect(const Group& group, const std::vector<int>& devices) {
  const nccl::Functions& f = group.library.functions();
  const std::size_t size = devices.size();
  std::vector<DeviceArray<std::uint8_t>> buffers;
  for (const int device : devices) {
    check(cudaSetDevice(device), "choice of the device");
    buffers.emplace_back(2 * size * kConnectBytes);
  }
  const auto on_all = [&](const char* what, auto&& call) {
    group.library.check(f.group_start(), "ncclGroupStart");
    for (std::size_t rank = 0; rank < size; ++rank) {
      check(cudaSetDevice(devices[rank]), "choice of the device");
      call(group.comms[rank], buffers[rank].data(), buffers[rank].data() + size * kConnectBytes);
    }
    group.library.check(f.group_end(), what);
    for (const int device : devices) {
      check(cudaSetDevice(device), "choice of the device");
      check(cudaDeviceSynchronize(), what);
    }
  };
  on_all("first ncclSend", [&](nccl::Comm comm, std::uint8_t* from, std::uint8_t* to) {
    for (std::size_t peer = 0; peer < size; ++peer) {
      const std::size_t at = peer * kConnectBytes;
      group.library.check(f.send(from + at, kConnectBytes, nccl::kUint8, static_cast<int>(peer), comm, nullptr),
                          "ncclSend");
      group.library.check(f.recv(to + at, kConnectBytes, nccl::kUint8, static_cast<int>(peer), comm, nullptr),
                          "ncclRecv");
    }
  });
  on_all("first ncclAllGather", [&](nccl::Comm comm, std::uint8_t* from, std::uint8_t* to) {
    group.library.check(f.all_gather(from, to, kConnectBytes, nccl::kUint8, comm, nullptr), "ncclAllGather");
  });
}

}  // namespace

Communicators make_nccl_communicators(const std::vector<int>& devices, const CommunicatorLimits& limits,
                                      const std::string& path) {
  if (std::set<int>(devices.begin(), devices.end()).size() < devices.size()) {
    throw Error(ErrorKind::kEngineIncompatible, "NCCL takes one rank a device; give as many devices as ranks");
  }
  int current = 0;
  check(cudaGetDevice(&current), "current device");
  auto group = std::make_shared<Group>(devices, path);
  Communicators ends;
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    check(cudaSetDevice(devices[rank]), "choice of the device");
    ends.push_back(std::make_unique<NcclCommunicator>(group, static_cast<int>(rank), limits));
  }
  connect(*group, devices);
  check(cudaSetDevice(current), "choice of the device");
  return ends;
}

}  // namespace aotllm::cuda
