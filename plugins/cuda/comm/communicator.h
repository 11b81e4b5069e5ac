#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "elementwise/elementwise.h"
#include "launch.h"

// What the ranks of a tensor-parallel engine exchange. Rank r is a thread of this process with a stream of its own; its
// device may be that of other ranks, too.
namespace aotllm::cuda {

/// out = Σ_r partial_r + bias + residual by elements of [rows, width], summed in float32 in the order of ranks and
/// rounded once, so that every rank gets the same bits. bias and residual are the same on all ranks.
struct AllReduceArgs {
  const __nv_bfloat16* partial = nullptr;   ///< this rank's addend
  const float* bias = nullptr;              ///< [width], or null
  const __nv_bfloat16* residual = nullptr;  ///< or null
  __nv_bfloat16* out = nullptr;             ///< may be the memory of partial or of residual
  int rows = 0;
  int width = 0;  ///< a multiple of 8
  /// Or null: what is computed of the rounded result, as by `rms_norm` but for the order of its sum. m and width are
  /// those above, x is out; no pick and no residual. Only where the communicator takes_norm.
  const RmsNormArgs* norm = nullptr;
};

/// Columns of all ranks side by side on rank 0.
struct GatherArgs {
  const float* part = nullptr;  ///< [rows, columns] of this rank
  int rows = 0;
  int columns = 0;  ///< a multiple of 4
};

/// The most that the ranks exchange at once.
struct CommunicatorLimits {
  std::size_t elements = 0;         ///< of an all_reduce: rows · width
  std::size_t gathered_floats = 0;  ///< of a gather: rows · size · columns
};

/// One rank's end. All ranks make the same calls with the same sizes in the same order, each in its own stream; calls
/// only put work into it, and may be captured in graphs, which all ranks then replay alike.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  virtual void all_reduce(const AllReduceArgs& args, const Stream& stream) = 0;
  /// An all_reduce of this size can also normalize.
  virtual bool takes_norm(int /*rows*/, int /*width*/) const noexcept { return false; }
  virtual void gather(const GatherArgs& args, const Stream& stream) = 0;
  /// Rank 0: where gather puts [rows, size · columns], until the next one. Others: null.
  virtual float* gathered() const noexcept = 0;

  /// Waits, on the host, until all ranks have called it. Work that may wait for the whole device (a kernel's first
  /// launch, making a graph) goes before it, work of others that waits for this rank after.
  virtual void meet() = 0;
  /// Some ranks share a device.
  virtual bool shares_device() const noexcept = 0;
  /// Ends all waiting, of all ranks, now and later: on the host by Error(kInternal), on the device with results that
  /// mean nothing. Any thread may call it.
  virtual void abort() noexcept = 0;
};

/// An end for each rank; rank r is on devices[r]. The ends live as long as one of them does.
using Communicators = std::vector<std::unique_ptr<Communicator>>;

/// The devices can all read each other's memory.
bool have_peer_access(const std::vector<int>& devices);
/// The most ranks that `make_peer_communicators` takes.
inline constexpr int kMaxPeerRanks = 8;

/// Over memory that all ranks read (NVLink, PCIe, or one device for several ranks).
Communicators make_peer_communicators(const std::vector<int>& devices, const CommunicatorLimits& limits);

/// Over NCCL, from libnccl.so.2 at `path` or, where that is empty, where the dynamic linker finds it. Throws
/// Error(kEngineIncompatible) where there is none, or ranks share a device.
Communicators make_nccl_communicators(const std::vector<int>& devices, const CommunicatorLimits& limits,
                                      const std::string& path = {});

/// The first of these that the devices allow.
Communicators make_communicators(const std::vector<int>& devices, const CommunicatorLimits& limits);

}  // namespace aotllm::cuda
