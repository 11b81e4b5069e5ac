#include "chain.cuh"
#include "sampling/sampling.h"

namespace aotllm::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) count_kernel(const CountArgs args) {
  release_successor();
  wait_for_predecessor();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= args.num_tokens) return;
  const std::int32_t token = args.tokens[i];
  const std::int32_t slot = args.slots[i];
  if (token < 0 || token >= args.vocab_size || slot < 0) return;
  std::uint32_t* count = args.counts + static_cast<std::size_t>(slot) * args.vocab_size + token;
  if (args.in_prompt) {
    atomicOr(count, kSeenInPrompt);
  } else {
    atomicAdd(count, 1U);
  }
}

/// A row of blocks for each slot.
__global__ void __launch_bounds__(kThreads)
    clear_kernel(std::uint32_t* counts, int vocab_size, const std::int32_t* slots) {
  release_successor();
  wait_for_predecessor();
  std::uint32_t* of_slot = counts + static_cast<std::size_t>(slots[blockIdx.y]) * vocab_size;
  const int step = static_cast<int>(gridDim.x) * kThreads;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < vocab_size; i += step) {
    of_slot[i] = 0;
  }
}

}  // namespace

void count_tokens(const CountArgs& args, const Stream& stream) {
  if (args.num_tokens == 0) return;
  const auto blocks = static_cast<unsigned>((args.num_tokens + kThreads - 1) / kThreads);
  launch(count_kernel, dim3(blocks), dim3(kThreads), 0, stream, args);
}

void clear_counts(std::uint32_t* counts, int vocab_size, const std::int32_t* slots, int num_slots,
                  const Stream& stream) {
  if (num_slots == 0) return;
  launch(clear_kernel, dim3(32, static_cast<unsigned>(num_slots)), dim3(kThreads), 0, stream, counts, vocab_size,
         slots);
}

}  // namespace aotllm::cuda
