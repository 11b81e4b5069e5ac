#include "runner/cuda/weight_store.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <variant>

#include "aotllm/errors.h"
#include "runner/cuda/device.h"
#include "runner/cuda/pinned.h"
#include "runner/gpu_requirements.h"

namespace aotllm::cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kChunkBytes = std::size_t{8} << 20;
constexpr unsigned kMaxCopyThreads = 8;  // of a PCIe link, four are enough; page faults make it eight

/// Copies chunks that it takes from a shared counter: pages of the file into pinned memory while the last chunk is on
/// its way.
class ChunkCopier {
 public:
  ChunkCopier() : staging_{PinnedArray<std::uint8_t>(kChunkBytes), PinnedArray<std::uint8_t>(kChunkBytes)} {}

  void copy(const std::uint8_t* from, std::size_t bytes, std::uint8_t* to) {
    const int i = turn_++ % 2;
    if (turn_ > 2) check(cudaEventSynchronize(done_[i].handle()), "copy of weights");
    std::memcpy(staging_[i].data(), from, bytes);
    check(cudaMemcpyAsync(to, staging_[i].data(), bytes, cudaMemcpyHostToDevice, stream_.handle()), "copy of weights");
    check(cudaEventRecord(done_[i].handle(), stream_.handle()), "copy of weights");
  }
  void finish() { check(cudaStreamSynchronize(stream_.handle()), "copy of weights"); }

 private:
  OwnedStream stream_;
  OwnedEvent done_[2];
  PinnedArray<std::uint8_t> staging_[2];
  int turn_ = 0;
};

}  // namespace

WeightType weight_type(MatrixFormat format) {
  switch (format) {
    case MatrixFormat::kBf16:
      return WeightType::kBf16;
    case MatrixFormat::kFp8:
      return WeightType::kFp8;
    case MatrixFormat::kFp8Block:
      return WeightType::kFp8Block;
    case MatrixFormat::kInt8:
      return WeightType::kInt8;
    case MatrixFormat::kInt4:
      return WeightType::kInt4;
  }
  throw Error(ErrorKind::kInternal, "a format of weights that is none");
}

Weights WeightStore::matrix(const Linear& linear) const {
  const Matrix& m = linear.matrix;
  return {weight_type(m.format), linear.n, linear.k, find(m.data), find(m.scales), find(m.zeros), m.group};
}

WeightStore::WeightStore(const Plan& plan) {
  collect(plan);
  check_gpu_memory({static_cast<std::int64_t>(size_), plan.arena_bytes, plan.max_num_tokens}, free_device_bytes());
  memory_ = DeviceArray<std::uint8_t>(size_);
  std::vector<Piece> chunks;
  for (const auto& [from, piece] : pieces_) {
    for (std::size_t at = 0; at < piece.bytes; at += kChunkBytes) {
      chunks.push_back({piece.from + at, std::min(kChunkBytes, piece.bytes - at), piece.offset + at});
    }
  }
  copy_chunks(chunks);
}

const void* WeightStore::find(const void* mapped) const {
  const auto it = pieces_.find(mapped);
  if (it == pieces_.end()) throw Error(ErrorKind::kInternal, "a tensor of the plan is not on the device");
  return memory_.data() + it->second.offset;
}

void WeightStore::add(std::span<const std::uint8_t> bytes) {
  if (bytes.empty()) return;
  const auto [it, is_new] = pieces_.try_emplace(bytes.data(), Piece{bytes.data(), bytes.size(), size_});
  if (is_new) size_ += (bytes.size() + kAlignment - 1) / kAlignment * kAlignment;
}

void WeightStore::add(std::span<const float> values) {
  add(std::span(reinterpret_cast<const std::uint8_t*>(values.data()), values.size_bytes()));
}

void WeightStore::collect(const Plan& plan) {
  for (const Linear& linear : plan.linears) {
    add(linear.matrix.data);
    add(linear.matrix.scales);
    add(linear.matrix.zeros);
  }
  for (const RopeTable& table : plan.rope) add(table.inv_freq);
  for (const Op& op : plan.ops) {
    if (const auto* qkv = std::get_if<NormQkvRopeOp>(&op)) {
      add(qkv->norm);
      add(qkv->bias);
      add(qkv->q_norm);
      add(qkv->k_norm);
    } else if (const auto* linear = std::get_if<LinearResidualOp>(&op)) {
      add(linear->bias);
      add(linear->post_norm);
    } else if (const auto* swiglu = std::get_if<NormSwigluOp>(&op)) {
      add(swiglu->norm);
      add(swiglu->gate_up_bias);
    } else if (const auto* moe = std::get_if<NormMoeOp>(&op)) {
      add(moe->norm);
      add(moe->router);
    } else if (const auto* head = std::get_if<LmHeadOp>(&op)) {
      add(head->norm);
      add(head->bias);
    }
  }
}

void WeightStore::copy_chunks(const std::vector<Piece>& chunks) const {
  int device = 0;
  check(cudaGetDevice(&device), "current device");
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      check(cudaSetDevice(device), "choice of the device");
      ChunkCopier copier;
      for (std::size_t i = next++; i < chunks.size(); i = next++) {
        copier.copy(chunks[i].from, chunks[i].bytes, memory_.data() + chunks[i].offset);
      }
      copier.finish();
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
  };
  const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1u, kMaxCopyThreads);
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace aotllm::cuda
