#include "aotllm/tp_runner.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "aotllm/errors.h"
#include "comm/communicator.h"
#include "engine/plan.h"
#include "runner/cuda/device.h"
#include "runner/cuda/rank.h"
#include "runner/cuda/rank_threads.h"
#include "support/free_memory.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// Throws Error(kEngineIncompatible) unless `engines` are all ranks of one engine, in order.
void check_ranks(const std::vector<Engine>& engines) {
  const Plan& first = engines.front().plan();
  for (std::size_t rank = 0; rank < engines.size(); ++rank) {
    const Plan& plan = engines[rank].plan();
    cuda::check_target(plan);
    const bool fits = plan.tp_size == std::ssize(engines) && plan.tp_rank == static_cast<int>(rank) &&
                      plan.sm == first.sm && plan.vocab_size == first.vocab_size &&
                      plan.hidden_size == first.hidden_size && plan.max_seq_len == first.max_seq_len &&
                      plan.max_num_tokens == first.max_num_tokens && plan.max_batch_size == first.max_batch_size &&
                      plan.ops.size() == first.ops.size() && plan.kv.layers.size() == first.kv.layers.size() &&
                      plan.kv.tokens_per_block == first.kv.tokens_per_block;
    if (!fits) {
      throw Error(ErrorKind::kEngineIncompatible,
                  cat("file ", rank, " of ", engines.size(), " is rank ", plan.tp_rank, " of ", plan.tp_size,
                      " or of another engine; build all ranks together"));
    }
  }
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
  std::vector<std::optional<cuda::Rank>> ranks;
  std::vector<cuda::Communicator*> ends;  ///< of the ranks, which own them
  std::optional<cuda::StepCheck> check;
  bool failed = false;
};

TpRunner::Impl::Impl(std::vector<Engine> engines, const std::vector<int>& devices_in, const CudaRunnerOptions& options)
    : devices(devices_in), threads(static_cast<int>(engines.size())), ranks(engines.size()) {
  check_ranks(engines);
  if (devices.size() != engines.size()) throw Error(ErrorKind::kInternal, "a device for each rank is needed");
  const Plan& plan = engines.front().plan();
  check.emplace(engines.front().shape());
  for (const int device : devices) cuda::open_device(device, plan.sm);
  cuda::Communicators communicators = cuda::make_communicators(devices, cuda::communicator_limits(plan));
  // Streams that are made one after the other do not share a queue of the driver.
  std::vector<cuda::OwnedStream> streams;
  for (std::size_t r = 0; r < engines.size(); ++r) {
    cuda::check(cudaSetDevice(devices[r]), "choice of the device");
    streams.emplace_back();
    ends.push_back(communicators[r].get());
  }
  threads.run([&](int r) {
    const auto index = static_cast<std::size_t>(r);
    CudaRunnerOptions mine = options;
    mine.device = devices[index];
    cuda::check(cudaSetDevice(mine.device), "choice of the device");
    ranks[index].emplace(std::move(engines[index]), mine, std::move(streams[index]), std::move(communicators[index]));
  });
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
  return impl_->ranks.front()->engine().shape();
}

FreeMemory TpRunner::free_memory() const {
  std::int64_t least = INT64_MAX;
  for (const int device : impl_->devices) {
    cuda::check(cudaSetDevice(device), "choice of the device");
    least = std::min(least, cuda::free_device_bytes() / std::ranges::count(impl_->devices, device));
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
    impl.on_all([&](cuda::Rank& rank, int) { rank.step(sequences, outputs); }, [&] { impl.ends.front()->abort(); });
  } catch (...) {
    impl.failed = true;
    throw;
  }
}

}  // namespace aotllm
