#include "aotllm/cuda_tuner.h"

#include <algorithm>
#include <memory>
#include <set>
#include <tuple>

#include "bench/timing.h"
#include "device_array.h"
#include "elementwise/random_fill.h"
#include "engine/plan.h"
#include "runner/cuda/device.h"
#include "runner/cuda/linear_kernels.h"
#include "runner/cuda/tactic_table.h"
#include "runner/cuda/weight_store.h"
#include "support/strings.h"

namespace aotllm {
namespace {

using cuda::DeviceArray;
using cuda::Epilogue;
using cuda::Gemm;
using cuda::GemmProblem;

/// Weights are rotated over more than the L2 holds, so that they come from memory as in a model.
constexpr std::int64_t kRotatedBytes = std::int64_t{160} << 20;
constexpr int kMaxCopies = 64;
/// Of the library's heuristics, beyond its first choice.
constexpr int kLibraryCandidates = 3;
/// Seconds that the library's kernels lose in an engine: they do not begin while their predecessor ends, nor let their
/// successor.
constexpr double kLibraryBoundary = 2e-6;

struct Shape {
  MatrixFormat format;
  int n;
  int k;
  int group;  // of integers
  Epilogue epilogue;

  bool has_integers() const { return format == MatrixFormat::kInt8 || format == MatrixFormat::kInt4; }

  auto key() const { return std::tuple(format, n, k); }
};

/// The shapes that the plan multiplies by, each once.
std::vector<Shape> shapes_of(const Plan& plan) {
  std::vector<Shape> shapes;
  const auto add = [&](int linear, Epilogue epilogue) {
    const Linear& l = plan.linears[static_cast<std::size_t>(linear)];
    const Shape shape{l.matrix.format, l.n, l.k, l.matrix.group, epilogue};
    const auto same = [&](const Shape& other) { return other.key() == shape.key(); };
    if (std::none_of(shapes.begin(), shapes.end(), same)) shapes.push_back(shape);
  };
  for (const Op& op : plan.ops) {
    if (const auto* qkv = std::get_if<NormQkvRopeOp>(&op)) add(qkv->linear, Epilogue::kStore);
    if (const auto* l = std::get_if<LinearResidualOp>(&op)) {
      const bool stores = l->all_reduce || !l->post_norm.empty();
      add(l->linear, stores ? Epilogue::kStore : Epilogue::kResidual);
    }
    if (const auto* swiglu = std::get_if<NormSwigluOp>(&op)) add(swiglu->gate_up, Epilogue::kGated);
    if (const auto* head = std::get_if<LmHeadOp>(&op)) add(head->linear, Epilogue::kLogits);
  }
  return shapes;
}

/// Copies of one shape's problem with weights of their own.
class Problems {
 public:
  Problems(const Shape& shape, int max_m) {
    const bool bf16 = shape.format == MatrixFormat::kBf16;
    const bool integers = shape.has_integers();
    const std::size_t n = static_cast<std::size_t>(integers ? (shape.n + 63) / 64 * 64 : shape.n);
    const std::size_t k = static_cast<std::size_t>(integers ? (shape.k + 127) / 128 * 128 : shape.k);
    const std::size_t m = static_cast<std::size_t>(max_m);
    const std::size_t bytes = shape.format == MatrixFormat::kInt4 ? n * k / 2 : n * k * (bf16 ? 2 : 1);
    const std::size_t k_blocks = (k + 127) / 128;
    const std::size_t groups = shape.group == 0 ? n : n * (k / static_cast<std::size_t>(shape.group));
    const auto copies =
        static_cast<int>(std::clamp<std::int64_t>(kRotatedBytes / static_cast<std::int64_t>(bytes) + 1, 2, kMaxCopies));
    weights_ = DeviceArray<std::uint8_t>(bytes * static_cast<std::size_t>(copies));
    x_ = DeviceArray<std::uint8_t>(m * k * 2);
    cuda::fill_random(weights_.data(), weights_.size(), bf16);
    cuda::fill_random(x_.data(), x_.size(), bf16 || integers);
    scales_ = DeviceArray<float>(std::vector<float>(std::max({n * k_blocks, m * k_blocks, groups}), 0.01f));
    zeros_ = DeviceArray<std::uint8_t>(integers ? groups : 0);
    if (integers) zeros_.fill(7);
    residual_ = DeviceArray<__nv_bfloat16>(m * n);
    residual_.fill(0);
    y_ = DeviceArray<float>(m * n);
    for (int i = 0; i < copies; ++i) {
      GemmProblem p;
      p.w = {cuda::weight_type(shape.format),
             shape.n,
             shape.k,
             weights_.data() + bytes * static_cast<std::size_t>(i),
             bf16 ? nullptr : scales_.data(),
             zeros_.data(),
             shape.group};
      p.x = x_.data();
      p.x_scales = bf16 || integers ? nullptr : scales_.data();
      p.max_m = max_m;
      p.epilogue = shape.epilogue;
      p.residual = residual_.data();
      p.y = y_.data();
      problems_.push_back(p);
    }
  }

  const std::vector<GemmProblem>& all() const { return problems_; }

 private:
  DeviceArray<std::uint8_t> weights_;
  DeviceArray<std::uint8_t> x_;
  DeviceArray<float> scales_;
  DeviceArray<std::uint8_t> zeros_;
  DeviceArray<__nv_bfloat16> residual_;
  DeviceArray<float> y_;
  std::vector<GemmProblem> problems_;
};

/// A kernel that takes a shape, on each copy of its problem.
struct Candidate {
  std::string kernel;
  std::vector<std::unique_ptr<Gemm>> gemms;

  double seconds(int m, int sm) const {
    const int calls = static_cast<int>(std::max<std::size_t>(gemms.size(), 8));
    const auto work = [&](int i, const cuda::Stream& stream) {
      gemms[static_cast<std::size_t>(i) % gemms.size()]->launch(m, stream);
    };
    return cuda::time_in_graph(calls, work, 5, true, sm);
  }
};

/// What matrices are multiplied with on SM90, or, from SM80 on, anywhere.
std::vector<std::string> kernel_names(bool integers, int sm) {
  std::vector<std::string> names;
  const char* prefix = integers ? "dequant." : "";
  if (sm < 90) {
    for (int tile = 0; tile < cuda::num_sm80_shapes(); ++tile) names.push_back(cat(prefix, "sm80.", tile));
  } else {
    for (const int rows : {8, 16, 32, 64}) names.push_back(cat(integers ? "int." : "skinny.", rows));
    for (int tile = 0; tile < cuda::num_gemm_tiles(); ++tile) names.push_back(cat(prefix, "tile.", tile));
  }
  names.push_back(cat(prefix, "cublaslt"));
  for (int i = 1; i <= kLibraryCandidates; ++i) names.push_back(cat(prefix, "cublaslt.", i));
  return names;
}

std::vector<Candidate> candidates(const cuda::LinearKernels& kernels, const std::vector<GemmProblem>& problems,
                                  bool integers) {
  std::vector<Candidate> found;
  for (const std::string& name : kernel_names(integers, kernels.sm())) {
    Candidate candidate{name, {}};
    for (const GemmProblem& problem : problems) {
      auto gemm = kernels.make(problem, name);
      if (gemm == nullptr) break;
      candidate.gemms.push_back(std::move(gemm));
    }
    if (candidate.gemms.size() == problems.size()) found.push_back(std::move(candidate));
  }
  return found;
}

std::vector<int> row_counts(int max_rows) {
  std::vector<int> counts;
  for (int rows = 1; rows < max_rows; rows = rows == 1 ? 8 : rows * 2) counts.push_back(rows);
  counts.push_back(max_rows);
  return counts;
}

TunedLinear tune_shape(const Shape& shape, int max_rows, const cuda::LinearKernels& kernels) {
  TunedLinear tuned{cuda::format_name(shape.format), shape.n, shape.k, {}};
  const Problems problems(shape, (max_rows + 127) / 128 * 128);
  const std::vector<Candidate> all = candidates(kernels, problems.all(), shape.has_integers());
  for (const int rows : row_counts(max_rows)) {
    TunedLinear::Choice best;
    double least = 0.0;
    for (const Candidate& candidate : all) {
      if (candidate.gemms.front()->max_rows() < rows) continue;
      const double seconds = candidate.seconds(rows, kernels.sm());
      const double cost = seconds + (candidate.kernel.find("cublaslt") == std::string::npos ? 0.0 : kLibraryBoundary);
      if (!best.kernel.empty() && cost >= least) continue;
      best = {rows, candidate.kernel, seconds};
      least = cost;
    }
    if (!best.kernel.empty()) tuned.choices.push_back(std::move(best));
  }
  return tuned;
}

}  // namespace

std::vector<TunedLinear> tune(const Engine& engine, const TunerOptions& options) {
  const Plan& plan = engine.plan();
  if (plan.target != Target::kCuda) {
    throw Error(ErrorKind::kEngineIncompatible, "only engines of target cuda are tuned; build it with --target cuda");
  }
  cuda::open_device(options.device, plan.sm);
  DeviceArray<std::uint8_t> workspace(cuda::gemm_workspace_bytes(plan));
  workspace.fill(0);
  const cuda::LinearKernels kernels({workspace.data(), workspace.size()}, options.cublaslt, false, {}, plan.sm);
  std::vector<TunedLinear> tuned;
  for (const Shape& shape : shapes_of(plan)) {
    const int rows =
        shape.epilogue == Epilogue::kLogits ? std::min(plan.max_batch_size, plan.max_num_tokens) : plan.max_num_tokens;
    tuned.push_back(tune_shape(shape, rows, kernels));
  }
  return tuned;
}

}  // namespace aotllm
