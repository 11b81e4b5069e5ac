#include <limits>
#include <string>

#include "aotllm/errors.h"
#include "chain.cuh"
#include "sampling/row_search.cuh"
#include "sampling/sampling.h"

namespace aotllm::cuda {
namespace {

using namespace row_search;

static_assert(kMaxTopLogprobs <= kListCapacity);

/// Bins of the histogram cover this much below the largest logit; a listed token may well be further down.
constexpr float kBinnedRange = 50.0F;

__device__ void write_nothing(const RowLogprobsArgs& args, int index) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  if (threadIdx.x == 0) args.logprobs[index] = nan;
  for (int i = static_cast<int>(threadIdx.x); i < args.num_top; i += kThreads) {
    args.top_ids[index * args.num_top + i] = -1;
    args.top_logprobs[index * args.num_top + i] = nan;
  }
}

template <int kBlocks>
__device__ void write_row(const RowLogprobsArgs& args, int index, Row<kBlocks>& row) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const bool speaks = row.cluster().block_rank() == 0;
  const int source = args.rows == nullptr ? index : args.rows[index];
  const float* logits = args.logits + static_cast<std::size_t>(source) * args.vocab_size;
  row.read(logits);
  const std::uint64_t best = row.best();
  if (!is_finite_key(key_at(best))) {
    if (speaks) write_nothing(args, index);
    return;
  }
  const float max_logit = logit_of(key_at(best));
  const Weights weights{max_logit, 1.44269504088896340736};
  const double log_sum = log(static_cast<double>(row.total_mass(weights, kMinusInfinity)) * 0x1.0p-45);
  const auto logprob = [&](float logit) { return (static_cast<double>(logit) - max_logit) - log_sum; };
  if (speaks && threadIdx.x == 0) {
    const std::int32_t token = args.tokens[source];
    args.logprobs[index] = token < 0 || token >= args.vocab_size ? nan : logprob(logits[token]);
  }
  if (args.num_top == 0) return;
  const int count = min(args.num_top, args.vocab_size);
  const std::uint32_t floor =
      row.floor_of_top(static_cast<std::uint32_t>(count), {max_logit, kBins / kBinnedRange}, kMinusInfinity);
  const Bins bins = bins_between(max_logit, floor);
  row.template histogram<false>(bins, weights, floor);
  const Prefix last = row.find(false, static_cast<std::uint64_t>(count), bins, weights, floor);
  std::uint64_t* places = row.shared().merged_mass;
  row.collect(last.place, places);
  if (!speaks) return;
  for (int i = static_cast<int>(threadIdx.x); i < args.num_top; i += kThreads) {
    args.top_ids[index * args.num_top + i] = i < count ? id_at(places[i]) : -1;
    args.top_logprobs[index * args.num_top + i] = i < count ? logprob(logit_of(key_at(places[i]))) : nan;
  }
}

/// One cluster of kBlocks for each row.
template <int kBlocks>
__global__ void AOTLLM_BLOCKS_OF_ROW(kBlocks) __launch_bounds__(kThreads, 2)
    row_logprobs_kernel(const RowLogprobsArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  release_successor();
  const int index = static_cast<int>(blockIdx.x) / kBlocks;
  Row<kBlocks> row(shared, args.vocab_size, static_cast<std::uint32_t*>(args.workspace), index);
  row.cluster().sync();  // all blocks run, so that their memory is there
  wait_for_predecessor();
  write_row(args, index, row);
  row.cluster().sync();  // nobody reads it any more
}

template <int kBlocks>
void launch_row_logprobs(const RowLogprobsArgs& args, const Stream& stream) {
  const std::size_t bytes = shared_bytes(args.vocab_size, kBlocks);
  check(cudaFuncSetAttribute(row_logprobs_kernel<kBlocks>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "shared memory of log-probabilities");
  launch(row_logprobs_kernel<kBlocks>, dim3(static_cast<unsigned>(args.num_rows) * kBlocks), dim3(kThreads), bytes,
         stream, args);
}

}  // namespace

void row_logprobs(const RowLogprobsArgs& args, const Stream& stream) {
  if (args.num_rows == 0) return;
  if (args.vocab_size < 1 || args.vocab_size > kMaxSampledVocab || args.num_top < 0 || args.num_top > kMaxTopLogprobs) {
    throw Error(ErrorKind::kInternal, "log-probabilities on the device are for vocabularies of 1 to " +
                                          std::to_string(kMaxSampledVocab) + " tokens, of " +
                                          std::to_string(args.vocab_size) + " here, and list at most 256, " +
                                          std::to_string(args.num_top) + " here");
  }
  check_sampling_workspace(args.workspace_bytes, args.num_rows, args.vocab_size, stream);
  stream.sm < 90 ? launch_row_logprobs<1>(args, stream) : launch_row_logprobs<kClusterSize>(args, stream);
}

}  // namespace aotllm::cuda
