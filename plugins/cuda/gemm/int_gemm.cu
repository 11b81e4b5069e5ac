#include "gemm/int_gemm.h"

#include <algorithm>
#include <string>

#include "aotllm/errors.h"
#include "ceil_div.h"
#include "device_array.h"
#include "device_attribute.h"
#include "tensor_map.h"

namespace aotllm::cuda {
namespace {

IntKernel find_kernel(IntFormat format, int rows_tile, int rows, int sub) {
  switch (format) {
    case IntFormat::kInt4Group128:
      return int_kernel_int4_group128(rows_tile, rows, sub);
    case IntFormat::kInt4Group32:
      return int_kernel_int4_group32(rows_tile, rows, sub);
    case IntFormat::kInt8Row:
      return int_kernel_int8_row(rows_tile, rows, sub);
    case IntFormat::kInt8Group32:
      return int_kernel_int8_group32(rows_tile, rows, sub);
  }
  return {};
}

class IntGemm : public Gemm {
 public:
  IntGemm(const GemmProblem& problem, const IntShape& shape, int rows_tile, Workspace workspace, const IntPlan& plan,
          const IntKernel& kernel)
      : kernel_(kernel), max_rows_(std::min(rows_tile, problem.max_m)) {
    const Weights& w = problem.w;
    x_map_ = matrix_tensor_map(problem.x, 2, problem.max_m, w.k, rows_tile);
    args_.w = IntBlocks(w, shape);
    args_.n = w.n;
    args_.early = plan.early;
    args_.prefetch = plan.prefetch;
    args_.bias = problem.bias;
    args_.residual = problem.residual;
    args_.y = problem.y;
    args_.softcap = problem.softcap;
    args_.epilogue = problem.epilogue;
    args_.activation = problem.activation;
    split(plan);
    reserve(plan, rows_tile, workspace);
    name_ = std::string("int.") + (w.type == WeightType::kInt4 ? "int4" : "int8") + ".n" + std::to_string(rows_tile);
  }

  void launch(int m, const Stream& stream) const override {
    if (m < 1 || m > max_rows_) {
      throw Error(ErrorKind::kInternal,
                  name_ + ": got " + std::to_string(m) + " rows, takes 1 to " + std::to_string(max_rows_));
    }
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(args_.cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid_));
    config.blockDim = dim3(static_cast<unsigned>(kernel_.threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes_);
    config.stream = stream.handle;
    config.attrs = attributes;
    config.numAttrs = stream.programmatic ? 2 : 1;
    check(cudaLaunchKernelEx(&config, kernel_.function, x_map_, args_, m), "launch of an integer GEMM");
  }

  int max_rows() const override { return max_rows_; }
  std::string name() const override { return name_; }

 private:
  /// Which CTA computes what.
  void split(const IntPlan& plan) {
    const int tiles = ceil_div(args_.w.strips * kIntRows, plan.rows);
    const int per_tile = ceil_div(args_.w.k_blocks, plan.sub);
    args_.cluster = plan.cluster;
    while (per_tile % args_.cluster != 0) args_.cluster /= 2;
    const int wanted = plan.grid > 0 ? plan.grid : device_attribute(cudaDevAttrMultiProcessorCount);
    grid_ = args_.cluster > 1 ? tiles * args_.cluster : std::min(wanted, plan.whole ? tiles : tiles * per_tile);
    args_.split = SkinnySplit(tiles, per_tile, grid_, args_.cluster == 1 && plan.whole);
    // Counters of its own: whoever uses the workspace in between may leave anything in it.
    counters_ = DeviceArray<unsigned>(static_cast<std::size_t>(tiles));
    counters_.fill(0);
    args_.counters = counters_.data();
  }

  /// Workspace and shared memory.
  void reserve(const IntPlan& plan, int rows_tile, Workspace workspace) {
    args_.partials = static_cast<float4*>(workspace.data);
    const bool shares = args_.cluster == 1 && !plan.whole;  // else nothing passes through the workspace
    const std::size_t needed =
        !shares ? 0 : 2 * static_cast<std::size_t>(grid_) * static_cast<std::size_t>(kernel_.partial_bytes);
    if (workspace.bytes < needed) {
      throw Error(ErrorKind::kInternal, "an integer GEMM needs a workspace of " + std::to_string(needed) +
                                            " bytes, got " + std::to_string(workspace.bytes));
    }
    const int groups = rows_tile / 8;  // each CTA of a cluster receives sums of its groups of tokens from the others
    const int received = (args_.cluster - 1) * std::max(1, groups / args_.cluster) * 16 * kernel_.consumers;
    const int most_shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    const int fixed = kernel_.fixed_bytes + received;
    args_.stages = std::min({plan.stages, kIntMaxStages, (most_shared - fixed) / kernel_.stage_bytes});
    shared_bytes_ = args_.stages * kernel_.stage_bytes + fixed;
    if (args_.stages < 1) {
      throw Error(ErrorKind::kInternal, "an integer GEMM needs " + std::to_string(kernel_.stage_bytes + fixed) +
                                            " bytes of shared memory, got " + std::to_string(most_shared));
    }
    const auto* function = reinterpret_cast<const void*>(kernel_.function);  // its attributes are shared by all plans
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared),
          "shared memory of an integer GEMM");
    // The successor's blocks only fit next to this kernel's where nothing is set aside for the L1.
    check(
        cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "carve-out of an integer GEMM");
  }

  IntKernel kernel_;
  IntArgs args_;
  CUtensorMap x_map_;
  DeviceArray<unsigned> counters_;
  std::string name_;
  int grid_ = 0;
  int shared_bytes_ = 0;
  int max_rows_ = 0;
};

bool takes(const GemmProblem& problem, int rows_tile, IntShape& shape) {
  if (!int_shape(problem.w, shape) || problem.max_m <= 0 || !device_has_wgmma()) return false;
  return rows_tile == 8 || rows_tile == 16 || rows_tile == 32 || rows_tile == 64;
}

}  // namespace

// What was fastest on an H200 for the linears of Llama-3.1-8B (bench_int_gemm --sweep), as rules.
IntPlan default_int_plan(const IntShape& shape, int rows_tile, int multiprocessors) {
  const bool four_bits = int_has_four_bits(shape.format);
  const int tiles128 = ceil_div(shape.strips, 2);
  IntPlan plan;
  plan.sub = 2;
  int resident = rows_tile <= 16 ? 3 : 2;  // CTAs of a multiprocessor, by shared memory: the successor's are among them
  if (shape.strips <= multiprocessors) {   // a cluster for each tile: its sums do not pass through memory
    plan.rows = 64;
    plan.cluster = 2;
    const bool few = rows_tile <= (four_bits ? 16 : 8);  // rows of x, so that sums are quickly exchanged
    if (few && 4 * shape.strips <= 2 * multiprocessors) {
      plan.cluster = 4;
    } else if (rows_tile == 8 && 4 * tiles128 <= 2 * multiprocessors) {
      plan.rows = 128, plan.cluster = 4;
    }
    if (8 * shape.strips <= multiprocessors) plan.cluster = 8;
    if (four_bits && rows_tile <= 16 && plan.rows == 64 && plan.cluster < 8) {
      const bool is_long = shape.k_blocks >= 64;  // so that two CTAs of a cluster have enough to do
      const int cluster = rows_tile == 8 && !is_long ? plan.cluster : 2;
      if (ceil_div(shape.k_blocks, 4) % cluster == 0) {
        plan.sub = 4, plan.cluster = cluster;
        if (is_long) resident = 2;
      }
    }
  } else if (rows_tile == 64) {
    plan.grid = multiprocessors;
    resident = 1;
  } else if (2 * tiles128 < 3 * multiprocessors) {  // whole tiles would come out uneven
    plan.grid = 2 * multiprocessors;
    resident = 2;
  } else {
    plan.whole = true;
    resident = four_bits && rows_tile == 8 ? 4 : 2;
    plan.rows = resident == 4 ? 64 : 128;
    plan.sub = resident == 4 ? 4 : 2;
    plan.grid = resident == 4 ? shape.strips : tiles128;
  }
  const int stage = find_kernel(shape.format, rows_tile, plan.rows, plan.sub).stage_bytes;
  const int ring = resident == 1 ? 215 : 225 / resident - 2;  // KB
  plan.stages = std::clamp(ring * 1024 / stage, 2, kIntMaxStages);
  plan.early = plan.whole ? 1 << 20 : 64 * 1024 / stage;
  return plan;
}

std::unique_ptr<Gemm> make_int_gemm(const GemmProblem& problem, int rows_tile, Workspace workspace,
                                    const IntPlan& plan) {
  IntShape shape;
  if (!takes(problem, rows_tile, shape)) return nullptr;
  const IntKernel kernel = find_kernel(shape.format, rows_tile, plan.rows, plan.sub);
  if (kernel.function == nullptr) return nullptr;
  return std::make_unique<IntGemm>(problem, shape, rows_tile, workspace, plan, kernel);
}

std::unique_ptr<Gemm> make_int_gemm(const GemmProblem& problem, int rows_tile, Workspace workspace) {
  IntShape shape;
  if (!takes(problem, rows_tile, shape)) return nullptr;
  return make_int_gemm(problem, rows_tile, workspace,
                       default_int_plan(shape, rows_tile, device_attribute(cudaDevAttrMultiProcessorCount)));
}

}  // namespace aotllm::cuda
