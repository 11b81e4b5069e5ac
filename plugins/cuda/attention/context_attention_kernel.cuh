#pragma once

#include "attention/context_attention_config.cuh"

#include <cutlass/arch/grid_dependency_control.h>
#include <cutlass/arch/reg_reconfig.h>

#include "attention/context_attention_load.cuh"
#include "attention/context_attention_softmax.cuh"
#include "uniform_warpgroup.cuh"

// The kernel of context attention: a producer warpgroup fills rings of K and V tiles, two consumer warpgroups of 64
// queries each multiply (wgmma) and keep the online softmax in registers. A consumer issues Q·Kᵀ of a step together
// with P·V of the one before, and computes the softmax while the latter runs; with kTakeTurns the two alternate, so
// that the softmax of one runs under the products of the other. Items of one block follow each other without a gap:
// keys are prefetched through the rings, queries as soon as the last product with the old ones is done.
namespace aotllm::cuda::context {

template <class C>
class Consumer {
 public:
  __device__ Consumer(const Parameters& p, SharedStorage<C>& shared, int index)
      : p_(p), shared_(shared), index_(index), thread_(static_cast<int>(threadIdx.x) % 128), next_(C::kCluster) {}

  __device__ void run() {
    using namespace cute;
    next_.advance(p_);
    if (next_.valid && thread_ == 0) load_queries<C>(p_, shared_, index_, next_);
    if (C::kTakeTurns && index_ == 1) cutlass::arch::NamedBarrier::arrive(256, kTurn);
    while (next_.valid) {
      const Work work = next_;
      attend(work);
    }
  }

 private:
  using Scores = decltype(cute::partition_fragment_C(typename C::ScoreMma{},
                                                     cute::Shape<typename C::RowSize, typename C::KeySize>{}));
  using Values = decltype(cute::partition_fragment_C(typename C::ValueMma{},
                                                     cute::Shape<typename C::RowSize, typename C::DimSize>{}));
  /// P as the register operand A of wgmma: words in the order of the accumulator of the scores.
  using Probabilities = decltype(cute::make_tensor<typename C::Element>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<C::kKeys / 16>>>{}));
  static constexpr int kScores = C::kKeys / 2;     // of a thread
  static constexpr int kValues = C::kHeadDim / 2;  // of a thread

  __device__ void attend(const Work& work) {
    using namespace cute;
    const KeyRange range = KeyRange::of<C>(work.tile, p_.window);
    Scores scores;
    Values values;
    Probabilities probabilities;
    Softmax softmax;
    clear(values);

    FullBarrier::wait(&shared_.q_full[index_], q_phase_);
    q_phase_ ^= 1;
    if constexpr (C::kFp8) convert_queries<C>(shared_.q[index_], thread_, kConsumerGroup + index_);
    FullBarrier::wait(&shared_.k_full[keys_.stage], keys_.phase);
    issue_scores(scores);
    next_.advance(p_);
    warpgroup_wait<0>();
    warpgroup_fence_operand(scores);
    release(shared_.k_empty, keys_);
    if (range.last_step == range.first_step) prefetch_queries();
    weigh(scores, softmax, work, range.last_step);
    pack(scores, probabilities);

#pragma unroll 1
    for (int step = range.last_step - 1; step >= range.first_step; --step) {
      FullBarrier::wait(&shared_.k_full[keys_.stage], keys_.phase);
      if (C::kTakeTurns) cutlass::arch::NamedBarrier::sync(256, kTurn + index_);
      issue_scores(scores);
      FullBarrier::wait(&shared_.v_full[values_.stage], values_.phase);
      issue_values(probabilities, values);
      if (C::kTakeTurns) cutlass::arch::NamedBarrier::arrive(256, kTurn + (index_ ^ 1));
      warpgroup_wait<1>();
      warpgroup_fence_operand(scores);
      release(shared_.k_empty, keys_);
      if (step == range.first_step) prefetch_queries();
      const float2 factors = weigh(scores, softmax, work, step);
      warpgroup_wait<0>();
      warpgroup_fence_operand(values);
      release(shared_.v_empty, values_);
      pack(scores, probabilities);
      if (__any_sync(~0u, factors.x != 1.0f || factors.y != 1.0f)) {
        scale_rows<kValues>(values.data(), factors);
      }
    }
    FullBarrier::wait(&shared_.v_full[values_.stage], values_.phase);
    issue_values(probabilities, values);
    const float2 inverse = softmax.finish();
    warpgroup_wait<0>();
    warpgroup_fence_operand(values);
    release(shared_.v_empty, values_);
    store(work, values, inverse);
  }

  /// Starts scores = Q·Kᵀ with the tile at `keys_`.
  __device__ void issue_scores(Scores& scores) {
    using namespace cute;
    typename C::ScoreMma mma;
    const Tensor q = make_tensor(make_smem_ptr(shared_.q[index_]), typename C::QLayout{});
    const Tensor k = make_tensor(make_smem_ptr(shared_.k[0]), typename C::KLayout{});
    const auto slice = mma.get_slice(0);
    const Tensor a = slice.partition_fragment_A(q);  // descriptors [.., .., head_dim / 16]
    const Tensor b = slice.partition_fragment_B(k);
    warpgroup_fence_operand(scores);
    warpgroup_arrive();
    mma.accumulate_ = SM90::GMMA::ScaleOut::Zero;
#pragma unroll
    for (int i = 0; i < size<2>(a); ++i) {
      cute::gemm(mma, a(_, _, i), b(_, _, i, keys_.stage), scores);
      mma.accumulate_ = SM90::GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  }

  /// Starts values += P·V with the tile at `values_`.
  __device__ void issue_values(Probabilities& probabilities, Values& values) {
    using namespace cute;
    typename C::ValueMma mma;
    const Tensor v = make_tensor(make_smem_ptr(shared_.v[0]), typename C::VLayout{});  // [head_dim, keys]
    const Tensor b = mma.get_slice(0).partition_fragment_B(v);
    warpgroup_fence_operand(values);
    warpgroup_fence_operand(probabilities);
    warpgroup_arrive();
    mma.accumulate_ = SM90::GMMA::ScaleOut::One;
#pragma unroll
    for (int i = 0; i < size<2>(b); ++i) {
      cute::gemm(mma, probabilities(_, _, i), b(_, _, i, values_.stage), values);
    }
    warpgroup_commit_batch();
  }

  __device__ void release(std::uint64_t* empty, RingState<C::kStages>& state) {
    const int lane = thread_ % 32;
    if constexpr (C::kCluster == 1) {
      if (lane == 0) Barrier::arrive(&empty[state.stage]);
    } else {
      if (lane < C::kCluster) Barrier::arrive(&empty[state.stage], lane, 1);  // a barrier of each block
    }
    state.advance();
  }

  /// The products with the old queries are done: loads those of the next item.
  __device__ void prefetch_queries() {
    if (!next_.valid) return;
    cutlass::arch::NamedBarrier::sync(128, kConsumerGroup + index_);
    if (thread_ == 0) load_queries<C>(p_, shared_, index_, next_);
  }

  /// Scores of a step to probabilities (not yet normalised).
  __device__ float2 weigh(Scores& scores, Softmax& softmax, const Work& work, int step) {
    const int query = work.tile.position + index_ * C::kRows;  // the first of the warpgroup
    const int key = step * C::kKeys;
    if (C::kSoftcap) cap_scores<kScores>(scores.data(), p_.cap_scale);
    const bool future = key + C::kKeys - 1 > query;
    const bool past = p_.window > 0 && key <= query + C::kRows - 1 - p_.window;
    if (future || past) {
      const int row = thread_ / 32 * 16 + thread_ % 32 / 4;
      mask_scores<kScores>(scores.data(), query + row, key + 2 * (thread_ % 4), p_.window);
    }
    return softmax.template step<kScores>(scores.data(), p_.exponent_scale);
  }

  __device__ static void pack(const Scores& scores, Probabilities& probabilities) {
    auto words = cute::recast<std::uint32_t>(probabilities);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) words(i) = pack_pair<typename C::Element>(scores(2 * i), scores(2 * i + 1));
  }

  __device__ void store(const Work& work, const Values& values, float2 inverse) {
    const int row = index_ * C::kRows + thread_ / 32 * 16 + thread_ % 32 / 4;
    const std::int64_t stride = static_cast<std::int64_t>(p_.num_heads) * C::kHeadDim;
    __nv_bfloat16* out = p_.out + (work.tile.row + row) * stride + work.head * C::kHeadDim;
    store_rows<kValues>(values.data(), inverse, out, stride, work.tile.rows - row);
  }

  const Parameters& p_;
  SharedStorage<C>& shared_;
  const int index_;  // of the warpgroup among the consumers
  const int thread_;
  Work next_;
  RingState<C::kStages> keys_;
  RingState<C::kStages> values_;
  std::uint32_t q_phase_ = 0;
};

template <class C>
__device__ void init_barriers(SharedStorage<C>& shared) {
  constexpr int kConsumerWarps = 4 * C::kConsumers * C::kCluster;
  constexpr int kProducers = C::kFp8 ? Converter<C>::kThreads : 1;
  for (std::uint64_t& barrier : shared.q_full) Barrier::init(&barrier, 1);
  for (int i = 0; i < C::kStages; ++i) {
    Barrier::init(&shared.k_full[i], kProducers);
    Barrier::init(&shared.v_full[i], kProducers);
    Barrier::init(&shared.k_empty[i], kConsumerWarps);
    Barrier::init(&shared.v_empty[i], kConsumerWarps);
  }
  for (std::uint64_t& barrier : shared.raw_full) Barrier::init(&barrier, 1);
  for (std::uint64_t& barrier : shared.raw_empty) Barrier::init(&barrier, Converter<C>::kThreads);
  for (std::uint64_t& barrier : shared.ragged) Barrier::init(&barrier, 1);
  cutlass::arch::fence_barrier_init();
}

template <class C>
__device__ void sync_cluster() {
  if constexpr (C::kCluster == 1) {
    __syncthreads();
  } else {
    __syncwarp();
    cute::cluster_sync();
  }
}

template <class C>
__global__ void __cluster_dims__(C::kCluster, 1, 1) __launch_bounds__(C::kThreads, 1)
    context_attention_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ std::uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(bytes + (-cute::cast_smem_ptr_to_uint(bytes) & 1023));
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&p.q));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&p.kv));
    init_barriers<C>(shared);
  }
  sync_cluster<C>();
  cutlass::arch::launch_dependent_grids();
  cutlass::arch::wait_on_dependent_grids();

  const int warpgroup = uniform_warpgroup();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
    if constexpr (C::kFp8) {
      if (threadIdx.x < 32) {
        RawLoader<C>(p, shared).run();
      } else {
        Converter<C>(p, shared).run();
      }
    } else {
      if (threadIdx.x < 32) Loader<C>(p, shared).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
    Consumer<C>(p, shared, warpgroup - 1).run();
  }
  if (C::kCluster > 1) sync_cluster<C>();  // a block that has ended cannot be told of free stages
}

template <class C>
void launch_kernel(const Parameters& p, int blocks, const Stream& stream) {
  constexpr std::size_t kBytes = sizeof(SharedStorage<C>) + 1024;  // dynamic shared memory may start anywhere
  static_assert(kBytes <= 227 * 1024);
  auto* kernel = &context_attention_kernel<C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "context_attention: shared memory");
  blocks = blocks / C::kCluster * C::kCluster;
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(C::kThreads), kBytes, stream, p);
}

}  // namespace aotllm::cuda::context
