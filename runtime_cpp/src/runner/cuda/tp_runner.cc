#include "aotllm/tp_runner.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "aotllm/errors.h"
#include "comm/communicator.h"
#include "engine/plan.h"
#include "runner/cuda/device.h"
#include "runner/cuda/rank.h"
#include "runner/cuda/rank_threads.h"
#include "runner/cuda/stage_link.h"
#include "runner/rank_files.h"
#include "support/free_memory.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// Of all ranks: a block takes what it takes on the rank where that is most.
ModelShape shape_of(const std::vector<Engine>& engines) {
  ModelShape shape = engines.front().shape();
  for (const Engine& engine : engines) {
    for (std::size_t group = 0; group < shape.kv_groups.size(); ++group) {
      std::int64_t& bytes = shape.kv_groups[group].bytes_per_block;
      bytes = std::max(bytes, engine.shape().kv_groups[group].bytes_per_block);
    }
  }
  return shape;
}

/// How many times what a rank of shape `mine` holds of some blocks they take, at least, by `whole`: blocks that take up
/// to this times the rank's free memory fit it.
double least_ratio(const ModelShape& whole, const ModelShape& mine) {
  double least = 1e18;
  for (std::size_t group = 0; group < whole.kv_groups.size(); ++group) {
    const std::int64_t bytes = mine.kv_groups[group].bytes_per_block;
    if (bytes == 0) continue;
    least = std::min(least, static_cast<double>(whole.kv_groups[group].bytes_per_block) / static_cast<double>(bytes));
  }
  return least;
}

/// An end for each rank; null where a stage is one rank.
cuda::Communicators make_ends(const std::vector<Engine>& engines, const std::vector<int>& devices) {
  const auto tp = static_cast<std::size_t>(engines.front().plan().tp_size);
  cuda::Communicators ends(engines.size());
  for (std::size_t first = 0; tp > 1 && first < engines.size(); first += tp) {
    const std::vector<int> mine(devices.begin() + static_cast<std::ptrdiff_t>(first),
                                devices.begin() + static_cast<std::ptrdiff_t>(first + tp));
    cuda::Communicators stage = cuda::make_communicators(mine, cuda::communicator_limits(engines[first].plan()));
    std::move(stage.begin(), stage.end(), ends.begin() + static_cast<std::ptrdiff_t>(first));
  }
  return ends;
}

}  // namespace

std::vector<int> rank_devices(const std::vector<int>& given, int first, int size) {
  if (std::ssize(given) == size) return given;
  if (given.size() == 1) return std::vector<int>(static_cast<std::size_t>(size), given.front());
  if (!given.empty()) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("devices: expected one for each of the ", size, " ranks or one for all, got ", given.size()),
                "devices");
  }
  std::vector<int> devices;
  for (int rank = 0; rank < size; ++rank) devices.push_back(first + rank);
  return devices;
}

struct TpRunner::Impl {
  Impl(std::vector<Engine> engines, const std::vector<int>& devices, const CudaRunnerOptions& options);
  ~Impl();

  /// Runs work(rank, its index) on all ranks' threads, each with its device.
  template <class Work>
  void on_all(Work&& work, const std::function<void()>& on_failure = [] {}) {
    threads.run(
        [&](int r) {
          cuda::Rank& rank = *ranks[static_cast<std::size_t>(r)];
          rank.select();
          work(rank, r);
        },
        on_failure);
  }

  std::vector<int> devices;
  cuda::RankThreads threads;
  /// Ends all waiting of ranks for each other.
  void abort() noexcept;

  ModelShape shape;
  std::vector<std::optional<cuda::Rank>> ranks;         ///< [stage, rank of the stage]
  std::vector<cuda::Communicator*> ends;                ///< one of each stage, whose ranks own them
  std::vector<std::unique_ptr<cuda::StageLink>> links;  ///< between ranks of the same place
  std::optional<cuda::StepCheck> check;
  bool failed = false;
};

TpRunner::Impl::Impl(std::vector<Engine> engines, const std::vector<int>& devices_in, const CudaRunnerOptions& options)
    : devices(devices_in), threads(static_cast<int>(engines.size())), shape(shape_of(engines)), ranks(engines.size()) {
  check_ranks(engines);
  cuda::check_target(engines.front().plan());
  if (devices.size() != engines.size()) throw Error(ErrorKind::kInternal, "a device for each rank is needed");
  const Plan& plan = engines.front().plan();
  check.emplace(engines.front().shape());
  for (const int device : devices) cuda::open_device(device, plan.sm);
  const auto tp = static_cast<std::size_t>(plan.tp_size);
  cuda::Communicators communicators = make_ends(engines, devices);
  // Streams that are made one after the other do not share a queue of the driver.
  std::vector<cuda::OwnedStream> streams;
  for (std::size_t r = 0; r < engines.size(); ++r) {
    cuda::check(cudaSetDevice(devices[r]), "choice of the device");
    streams.emplace_back();
    if (tp > 1 && r % tp == 0) ends.push_back(communicators[r].get());
  }
  threads.run([&](int r) {
    const auto index = static_cast<std::size_t>(r);
    CudaRunnerOptions mine = options;
    mine.device = devices[index];
    cuda::check(cudaSetDevice(mine.device), "choice of the device");
    ranks[index].emplace(std::move(engines[index]), mine, std::move(streams[index]), std::move(communicators[index]));
  });
  const bool share = std::set<int>(devices.begin(), devices.end()).size() < devices.size();
  for (std::size_t r = tp; r < ranks.size(); ++r) {
    links.push_back(
        std::make_unique<cuda::StageLink>(devices[r - tp], devices[r], ranks[r]->entering(), tp > 1 && share));
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r]->join(r < tp ? nullptr : links[r - tp].get(), r < links.size() ? links[r].get() : nullptr);
  }
}

void TpRunner::Impl::abort() noexcept {
  for (cuda::Communicator* end : ends) end->abort();
  for (const auto& link : links) link->abort();
}

/// No kernel of any rank runs any more: steps have waited for theirs, and copies are waited for here.
TpRunner::Impl::~Impl() {
  try {
    on_all([](cuda::Rank&, int) { cudaDeviceSynchronize(); });
  } catch (...) {  // the device has failed; memory is freed all the same
  }
}

TpRunner::TpRunner(std::vector<Engine> ranks, const std::vector<int>& devices, const CudaRunnerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(ranks), devices, options)) {}
TpRunner::~TpRunner() = default;

const ModelShape& TpRunner::shape() const {
  return impl_->shape;
}

bool TpRunner::samples() const noexcept {
  return cuda::StepSampler::samples(shape());
}

SamplingSupport TpRunner::sampling_support() const noexcept {
  return cuda::StepSampler::support(shape());
}

FreeMemory TpRunner::free_memory() const {
  std::int64_t least = INT64_MAX;
  for (std::size_t r = 0; r < impl_->ranks.size(); ++r) {
    const int device = impl_->devices[r];
    cuda::check(cudaSetDevice(device), "choice of the device");
    const std::int64_t mine = cuda::free_cache_bytes() / std::ranges::count(impl_->devices, device);
    const double room = static_cast<double>(mine) * least_ratio(impl_->shape, impl_->ranks[r]->engine().shape());
    least = std::min(least, static_cast<std::int64_t>(room));
  }
  std::optional<std::int64_t> host = aotllm::free_memory();
  if (host) *host /= std::ssize(impl_->devices);
  return {least, host, false};
}

void TpRunner::allocate_kv(const KvAllocation& allocation) {
  impl_->on_all([&](cuda::Rank& rank, int) { rank.allocate_kv(allocation); });
}

void TpRunner::copy_blocks(std::span<const BlockCopy> copies) {
  if (impl_->failed) throw Error(ErrorKind::kInternal, "copy_blocks: a rank has failed; load the engine again");
  impl_->on_all([&](cuda::Rank& rank, int) { rank.copy_blocks(copies); });
}

void TpRunner::step(std::span<const SequenceStep> sequences, StepOutputs& outputs) {
  Impl& impl = *impl_;
  if (impl.failed) throw Error(ErrorKind::kInternal, "step: a rank has failed; load the engine again");
  (*impl.check)(sequences, impl.ranks.front()->kv_allocation().device_blocks);
  try {
    impl.on_all([&](cuda::Rank& rank, int) { rank.step(sequences, outputs); }, [&] { impl.abort(); });
  } catch (...) {
    impl.failed = true;
    throw;
  }
}

}  // namespace aotllm
