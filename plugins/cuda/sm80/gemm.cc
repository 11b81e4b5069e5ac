#include "gemm/gemm.h"

#include <algorithm>
#include <string>

#include "aotllm/errors.h"
#include "ceil_div.h"
#include "device_array.h"
#include "device_attribute.h"
#include "sm80/gemm_shape.h"

namespace aotllm::cuda {
namespace {

using sm80::kTileShapes;
using sm80::TileShape;

constexpr int kMostSplits = 16;      // the last CTA of a tile reads as many shares
constexpr int kFewestSteps = 4;      // of a share, 128 bytes of k each
constexpr int kMostCounters = 4096;  // tiles whose sums are shared: fewer than CTAs fit on a device

/// Whether the code of `kernel` that the device runs is of SM89 or later, which multiplies E4M3.
bool multiplies_fp8(sm80::Kernel kernel) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "attributes of a GEMM");
  return attributes.ptxVersion >= 89;
}

class Sm80Gemm : public Gemm {
 public:
  Sm80Gemm(const GemmProblem& problem, int shape, Workspace workspace)
      : problem_(problem),
        shape_(kTileShapes[shape]),
        kernel_(problem.w.type == WeightType::kBf16 ? sm80::bf16_kernel(shape) : sm80::fp8_kernel(shape)),
        workspace_(workspace),
        counters_(shape_.splits ? kMostCounters : 0),
        name_(std::string("sm80.") + (problem.w.type == WeightType::kBf16 ? "bf16." : "fp8.") + std::to_string(shape)),
        steps_(ceil_div(problem.w.k * (problem.w.type == WeightType::kBf16 ? 2 : 1), 128)) {
    if (counters_.size() > 0) counters_.fill(0);
    const auto* function = reinterpret_cast<const void*>(kernel_);
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shape_.shared_bytes()),
          "shared memory of a GEMM");
    check(
        cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "carve-out of a GEMM");
    int per_multiprocessor = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, function, shape_.threads(),
                                                        static_cast<std::size_t>(shape_.shared_bytes())),
          "blocks of a GEMM");
    resident_ = per_multiprocessor * device_attribute(cudaDevAttrMultiProcessorCount);
  }

  void launch(int m, const Stream& stream) const override {
    if (m < 1 || m > problem_.max_m) {
      throw Error(ErrorKind::kInternal,
                  name_ + ": got " + std::to_string(m) + " rows, takes 1 to " + std::to_string(problem_.max_m));
    }
    sm80::LaunchArgs args;
    args.m = m;
    args.row_tiles = ceil_div(problem_.w.n, shape_.rows);
    args.token_tiles = ceil_div(m, shape_.tokens);
    const int tiles = args.row_tiles * args.token_tiles;
    args.steps_per_split = ceil_div(steps_, splits_for(tiles));
    args.splits = ceil_div(steps_, args.steps_per_split);
    args.partials = static_cast<float*>(workspace_.data);
    args.counters = const_cast<unsigned*>(counters_.data());
    cuda::launch(kernel_, dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(args.splits)),
                 dim3(static_cast<unsigned>(shape_.threads())), static_cast<std::size_t>(shape_.shared_bytes()), stream,
                 problem_, args);
  }

  int max_rows() const override { return problem_.max_m; }
  std::string name() const override { return name_; }

 private:
  /// CTAs that share the sum of a tile: as many as the device holds at once, bounded by what sharing costs.
  int splits_for(int tiles) const {
    if (!shape_.splits || tiles > kMostCounters) return 1;
    const auto share_bytes = static_cast<std::size_t>(tiles) * static_cast<std::size_t>(shape_.rows) *
                             static_cast<std::size_t>(shape_.tokens) * sizeof(float);
    const int fitting = static_cast<int>(std::min<std::size_t>(workspace_.bytes / share_bytes, kMostSplits));
    return std::max(1, std::min({fitting, resident_ / tiles, steps_ / kFewestSteps}));
  }

  GemmProblem problem_;
  TileShape shape_;
  sm80::Kernel kernel_;
  Workspace workspace_;
  DeviceArray<unsigned> counters_;
  std::string name_;
  int steps_;
  int resident_ = 1;  ///< CTAs that the device holds
};

}  // namespace

int num_sm80_shapes() {
  return sm80::kNumTileShapes;
}

std::unique_ptr<Gemm> make_sm80_gemm(const GemmProblem& problem, int shape, Workspace workspace) {
  const Weights& w = problem.w;
  const bool bf16 = w.type == WeightType::kBf16;
  if (!bf16 && w.type != WeightType::kFp8) return nullptr;
  const int unit = bf16 ? 16 : 32;
  if (w.n <= 0 || w.k <= 0 || w.n % unit != 0 || w.k % unit != 0) return nullptr;
  if (shape < 0 || shape >= sm80::kNumTileShapes) return nullptr;
  if (!bf16 && !multiplies_fp8(sm80::fp8_kernel(shape))) return nullptr;
  return std::make_unique<Sm80Gemm>(problem, shape, workspace);
}

}  // namespace aotllm::cuda
