#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "comm/communicator.h"
#include "elementwise/elementwise.h"
#include "launch.h"

namespace aotllm::cuda {

/// Blocks of every kernel that waits for peers, whatever its size: a block's counter and slots are its own. Where ranks
/// share a device, few enough to be resident beside the kernels of the others; else as many as keep the links busy.
inline constexpr int kSharedPeerBlocks = 16;
inline constexpr int kMaxPeerBlocks = 64;
inline constexpr int kPeerPhases = 2;  // waits in a kernel
inline constexpr int kPeerFlags = kPeerPhases * kMaxPeerBlocks * kMaxPeerRanks;

/// Memory of all ranks as one of them sees it.
struct PeerView {
  __nv_bfloat16* staging[kMaxPeerRanks] = {};  ///< of each rank: two slots of `capacity` elements, used in turn
  std::uint32_t* flags[kMaxPeerRanks] = {};    ///< of each rank: [phase][block][rank], written by that rank
  float* gathered = nullptr;                   ///< rank 0's, [rows, size · columns]
  std::uint32_t* calls = nullptr;              ///< own, [block]: kernels that this rank has run, the same in all
  const std::uint32_t* aborted = nullptr;      ///< on the host; not 0 = wait no more
  std::size_t capacity = 0;
  int blocks = kSharedPeerBlocks;  ///< of every kernel, the same for all ranks and calls
  int rank = 0;
  int size = 0;
};

/// `two_shots`: each rank sums a part and the others fetch it, instead of each summing all: less traffic, one wait
/// more.
void peer_all_reduce(const PeerView& view, const AllReduceArgs& args, bool two_shots, const Stream& stream);

/// The same in one shot, and the RMSNorm of the result; rows of at most kMaxNormWidth.
void peer_all_reduce_norm(const PeerView& view, const AllReduceArgs& args, const RmsNormArgs& norm,
                          const Stream& stream);
inline constexpr int kMaxNormWidth = 16384;

/// Every rank writes its columns into rank 0's view.gathered.
void peer_gather(const PeerView& view, const GatherArgs& args, const Stream& stream);

/// Loads the kernels, which may wait for the device: not to happen while another rank's kernel waits for this one.
void load_peer_kernels(int size);
void load_peer_norm_kernels(int size);

}  // namespace aotllm::cuda
