#include <cfloat>
#include <cmath>
#include <string>

#include "aotllm/errors.h"
#include "chain.cuh"
#include "sampling/row_search.cuh"
#include "sampling/sampling.h"
#include "sampling/uniform.cuh"

namespace aotllm::cuda {
namespace {

using namespace row_search;

/// What the draw of a row is made with.
struct Draw {
  double uniform = 0.0;
  double scale = 0.0;       // see Weights
  float per_logit = 0.0F;   // see Bins
  std::uint32_t floor = 0;  // key of the least likely token that is drawn from
};

/// What all threads of a block know of their row, in shared memory: registers are scarce.
struct alignas(16) Task {
  RowSampling params;
  Draw draw;
};

/// Works it out for the block, whose largest key is `max_key`. Tokens below min_p are left out; always those below
/// 2^-53 / vocab_size (`log_unreachable`), since all of them together are less than the resolution of a draw.
__device__ void prepare(const RowSampling& params, double log_unreachable, std::uint32_t max_key, Draw& draw) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool first_lane = threadIdx.x % 32 == 0;
  if (warp == 0) {
    const double temperature = params.temperature;
    const double max_logit = logit_of(max_key);
    double lowest = log_unreachable;
    if (params.min_p > 0.0F) lowest = fmax(lowest, log(static_cast<double>(params.min_p)));
    const std::uint32_t guess = key_of(static_cast<float>(max_logit + lowest * temperature));
    const std::uint32_t floor = first_key_near(guess, kMinusInfinity + 1, max_key, [&](std::uint32_t key) {
      return (static_cast<double>(logit_of(key)) - max_logit) / temperature >= lowest;
    });
    if (first_lane) {
      constexpr double kLog2E = 1.44269504088896340736;
      draw.floor = floor;
      draw.scale = kLog2E / temperature;
      draw.per_logit = fminf(kBins / static_cast<float>(fabs(lowest) * temperature), FLT_MAX);
    }
  } else if (warp == 1 && first_lane) {
    draw.uniform = uniform_draw(params.seed, params.position, params.sequence_index);
  }
  __syncthreads();
}

/// Filters and draw by likelihood: the top_k, of those the top_p, of those one.
template <int kBlocks>
__device__ std::int32_t draw_by_place(Row<kBlocks>& row, const RowSampling& params, const Draw& draw,
                                      const Weights& weights, int vocab_size) {
  const auto max_logit = static_cast<float>(weights.max);
  // Most tokens are far from the borders: their weights need not be told apart.
  std::uint32_t floor = draw.floor;
  std::uint64_t total = 0;
  if (params.top_k > 0) {
    floor = row.floor_of_top(static_cast<std::uint32_t>(params.top_k), {max_logit, draw.per_logit}, floor);
  } else {
    // vocab_size tokens of weights below this one are less than what top_p leaves out.
    total = row.total_mass(weights, floor);
    const float share = 0.99F * (1.0F - params.top_p) / static_cast<float>(vocab_size);
    const float log_weight = fminf(logf(share * (static_cast<float>(total) * 0x1.0p-45F)), 0.0F);
    const double logit = max_logit + static_cast<double>(log_weight) * params.temperature;
    floor = max(floor, key_of(__double2float_rd(logit)));
  }
  const Bins bins = bins_between(max_logit, floor);
  row.template histogram<true>(bins, weights, floor);
  const Shared& shared = row.shared();
  const bool cuts = params.top_k > 0 && static_cast<std::uint32_t>(params.top_k) < shared.row.count[kBins - 1];
  Prefix last;  // of the tokens that are left, which are the first ones
  last.mass = params.top_k > 0 ? shared.row.mass[kBins - 1] : total;
  enum Stage { kTopK, kTopP, kDraw };
#pragma unroll 1  // the search is long
  for (int stage = cuts ? kTopK : kTopP; stage <= kDraw; ++stage) {
    std::uint64_t target = 0;
    if (stage == kTopK) {
      target = static_cast<std::uint64_t>(params.top_k);
    } else if (stage == kDraw) {
      target = target_of_draw(draw.uniform, last.mass);
    } else if (params.top_p < 1.0F) {
      target = target_of_share(params.top_p, last.mass);
    } else {
      continue;
    }
    last = row.find(stage != kTopK, target, bins, weights, floor);
  }
  return id_at(last.place);
}

__device__ Adjustment adjustment_of(const SamplingArgs& args, int index, std::int32_t mask) {
  Adjustment adjustment;
  if (mask >= 0) {
    const std::size_t words = (static_cast<std::size_t>(args.vocab_size) + 31) / 32;
    adjustment.allowed = args.masks + static_cast<std::size_t>(mask) * words;
  }
  if (args.penalties != nullptr && args.penalties[index].slot >= 0) {
    adjustment.penalties = args.penalties[index];
    adjustment.counts = args.counts + static_cast<std::size_t>(adjustment.penalties.slot) * args.vocab_size;
  }
  return adjustment;
}

template <int kBlocks>
__device__ void sample_row(const SamplingArgs& args, double log_unreachable, int index, Task& task, Row<kBlocks>& row) {
  RowSampling fetched;
  if (threadIdx.x == 0) fetched = args.params[index];  // comes while the row does
  row.read(args.logits + static_cast<std::size_t>(index) * args.vocab_size);
  if (threadIdx.x == 0) task.params = fetched;
  __syncthreads();
  const RowSampling& params = task.params;
  Draw& draw = task.draw;
  if (params.mask >= 0 || args.penalties != nullptr) row.adjust(adjustment_of(args, index, params.mask));
  std::int32_t* token = args.tokens + index;
  const bool speaks = row.cluster().block_rank() == 0 && threadIdx.x == 0;
  const std::uint64_t best = row.best();
  const std::uint32_t max_key = key_at(best);
  if (!is_finite_key(max_key) || params.temperature == 0.0F) {
    if (speaks) *token = is_finite_key(max_key) ? id_at(best) : no_token(max_key);
    return;
  }
  prepare(params, log_unreachable, max_key, draw);
  const float max_logit = logit_of(max_key);
  const Weights weights{max_logit, draw.scale};
  if (params.top_k <= 0 && !(params.top_p < 1.0F)) {
    row.draw_by_id(draw.uniform, weights, draw.floor, token);
    return;
  }
  const std::int32_t drawn = draw_by_place(row, params, draw, weights, args.vocab_size);
  if (speaks) *token = drawn;
}

/// One cluster of kBlocks for each row.
template <int kBlocks>
__global__ void AOTLLM_BLOCKS_OF_ROW(kBlocks) __launch_bounds__(kThreads, 2)
    sample_kernel(const SamplingArgs args, double log_unreachable) {
  extern __shared__ __align__(16) unsigned char shared[];
  release_successor();
  const int index = static_cast<int>(blockIdx.x) / kBlocks;
  Row<kBlocks> row(shared + sizeof(Task), args.vocab_size, static_cast<std::uint32_t*>(args.workspace), index);
  row.cluster().sync();  // all blocks run, so that their memory is there
  wait_for_predecessor();
  sample_row(args, log_unreachable, index, *reinterpret_cast<Task*>(shared), row);
  row.cluster().sync();  // nobody reads it any more
}

template <int kBlocks>
void launch_sample(const SamplingArgs& args, const Stream& stream) {
  const double log_unreachable = -53.0 * std::log(2.0) - std::log(static_cast<double>(args.vocab_size));
  const std::size_t bytes = sizeof(Task) + shared_bytes(args.vocab_size, kBlocks);
  check(cudaFuncSetAttribute(sample_kernel<kBlocks>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "shared memory of sampling");
  launch(sample_kernel<kBlocks>, dim3(static_cast<unsigned>(args.num_rows) * kBlocks), dim3(kThreads), bytes, stream,
         args, log_unreachable);
}

}  // namespace

std::size_t sampling_workspace_bytes(int num_rows, int vocab_size, int sm) {
  return sm >= 90 ? 0 : static_cast<std::size_t>(num_rows) * slot_bytes(vocab_size, 1);
}

void check_sampling_workspace(std::size_t bytes, int num_rows, int vocab_size, const Stream& stream) {
  const std::size_t needed = sampling_workspace_bytes(num_rows, vocab_size, stream.sm);
  if (bytes >= needed) return;
  throw Error(ErrorKind::kInternal,
              "sampling: workspace of " + std::to_string(bytes) + " bytes, needed: " + std::to_string(needed));
}

void sample(const SamplingArgs& args, const Stream& stream) {
  if (args.num_rows == 0) return;
  if (args.vocab_size < 1 || args.vocab_size > kMaxSampledVocab) {
    throw Error(ErrorKind::kInternal, "sampling on the device is for vocabularies of 1 to " +
                                          std::to_string(kMaxSampledVocab) + " tokens, not of " +
                                          std::to_string(args.vocab_size));
  }
  check_sampling_workspace(args.workspace_bytes, args.num_rows, args.vocab_size, stream);
  stream.sm < 90 ? launch_sample<1>(args, stream) : launch_sample<kClusterSize>(args, stream);
}

}  // namespace aotllm::cuda
