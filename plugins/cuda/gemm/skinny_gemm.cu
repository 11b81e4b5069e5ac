#include "gemm/skinny_gemm.h"

#include <algorithm>
#include <string>

#include "aotllm/errors.h"
#include "ceil_div.h"
#include "device_array.h"
#include "device_attribute.h"
#include "tensor_map.h"

namespace aotllm::cuda {
namespace {

/// Stages along k of a tile.
int stages_of_tile(const Weights& w, const SkinnyPlan& plan) {
  return ceil_div(w.k * (w.type == WeightType::kBf16 ? 2 : 1), 128 * plan.sub);
}

/// The plan's CTAs of a cluster, or so many fewer that all have as much of k.
int fitting_cluster(const Weights& w, const SkinnyPlan& plan) {
  int cluster = plan.cluster;
  while (stages_of_tile(w, plan) % cluster != 0) cluster /= 2;
  return cluster;
}

/// Bytes of a ring beside which another CTA's fits.
constexpr int kHalfRing = 111 * 1024;

/// Shared memory of a CTA where two share a multiprocessor.
int half_of_shared() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2 -
         device_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
}

SkinnyKernel find_kernel(const GemmProblem& problem, int rows_tile, const SkinnyPlan& plan, bool chained = false) {
  const SkinnyRole role{true, problem.epilogue, fitting_cluster(problem.w, plan) > 1, chained};
  if (chained) return skinny_kernel_chained(rows_tile, plan.rows, plan.sub, role);
  switch (problem.w.type) {
    case WeightType::kBf16:
      return skinny_kernel_bf16(rows_tile, plan.rows, plan.sub, role);
    case WeightType::kFp8:
      return skinny_kernel_fp8(rows_tile, plan.rows, plan.sub, role);
    case WeightType::kFp8Block:
      return skinny_kernel_fp8_block(rows_tile, plan.rows, plan.sub, role);
    default:
      return {};
  }
}

bool takes(const GemmProblem& problem, int rows_tile) {
  const Weights& w = problem.w;
  const bool bf16 = w.type == WeightType::kBf16;
  if (!bf16 && w.type != WeightType::kFp8 && w.type != WeightType::kFp8Block) return false;
  const int multiple = bf16 ? 16 : 32;
  if (w.n <= 0 || w.k <= 0 || w.n % multiple != 0 || w.k % multiple != 0 || problem.max_m <= 0) return false;
  return rows_tile == 8 || rows_tile == 16 || rows_tile == 32 || rows_tile == 64;
}

class SkinnyGemm : public Gemm {
 public:
  SkinnyGemm(const GemmProblem& problem, int rows_tile, Workspace workspace, const SkinnyPlan& plan,
             const SkinnyKernel& kernel, const SkinnyLink& link = {})
      : kernel_(kernel), max_rows_(std::min(rows_tile, problem.max_m)) {
    const Weights& w = problem.w;
    const bool bf16 = w.type == WeightType::kBf16;
    w_map_ = matrix_tensor_map(w.data, bf16 ? 2 : 1, w.n, w.k, plan.rows);
    x_map_ = matrix_tensor_map(problem.x, bf16 ? 2 : 1, problem.max_m, w.k, rows_tile);

    const int tiles = ceil_div(w.n, plan.rows);
    const int per_tile = stages_of_tile(w, plan);
    args_.cluster = fitting_cluster(w, plan);
    const int wanted = plan.grid > 0 ? plan.grid : device_attribute(cudaDevAttrMultiProcessorCount);
    grid_ = args_.cluster > 1 ? tiles * args_.cluster : std::min(wanted, plan.whole ? tiles : tiles * per_tile);
    args_.split = SkinnySplit(tiles, per_tile, grid_, args_.cluster == 1 && plan.whole);
    args_.n = w.n;
    args_.early = plan.early;
    args_.prefetch = plan.prefetch;
    args_.k_blocks = ceil_div(w.k, 128);
    args_.w_scales = w.scales;
    args_.x_scales = problem.x_scales;
    args_.bias = problem.bias;
    args_.residual = problem.residual;
    args_.y = problem.y;
    args_.softcap = problem.softcap;
    args_.epilogue = problem.epilogue;
    args_.activation = problem.activation;
    args_.link = link;

    // Counters of its own: whoever uses the workspace in between may leave anything in it.
    counters_ = DeviceArray<unsigned>(static_cast<std::size_t>(tiles));
    counters_.fill(0);
    args_.counters = counters_.data();
    args_.partials = static_cast<float4*>(workspace.data);
    const bool shares = args_.cluster == 1 && !plan.whole;  // else nothing passes through the workspace
    const std::size_t needed =
        !shares ? 0 : 2 * static_cast<std::size_t>(grid_) * static_cast<std::size_t>(kernel.partial_bytes);
    if (workspace.bytes < needed) {
      throw Error(ErrorKind::kInternal, "a skinny GEMM needs a workspace of " + std::to_string(needed) +
                                            " bytes, got " + std::to_string(workspace.bytes));
    }

    const int groups = rows_tile / 8;  // each CTA of a cluster gets the sums of its groups of tokens from all
    const int finished = args_.cluster > 1 ? args_.cluster * std::max(1, groups / args_.cluster) : kernel.piece;
    const int most_shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    const int fixed = kernel.fixed_bytes + finished * kernel.group_bytes;
    int most = most_shared;
    if (kernel.scale_bytes > 0 && plan.stages * (kernel.stage_bytes - kernel.scale_bytes) <= kHalfRing) {
      most = half_of_shared();  // a link's scales and norms must not cost the second CTA of a multiprocessor
    }
    args_.stages = std::min({plan.stages, kSkinnyMaxStages, (most - fixed) / kernel.stage_bytes});
    shared_bytes_ = args_.stages * kernel.stage_bytes + fixed;
    if (args_.stages < 1) {
      throw Error(ErrorKind::kInternal, "a skinny GEMM needs " + std::to_string(kernel.stage_bytes + fixed) +
                                            " bytes of shared memory, got " + std::to_string(most_shared));
    }
    const auto* function = reinterpret_cast<const void*>(kernel.function);  // its attributes are shared by all plans
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared),
          "shared memory of a skinny GEMM");
    // The successor's blocks only fit next to this kernel's where nothing is set aside for the L1.
    check(
        cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "carve-out of a skinny GEMM");
    const char* type = bf16 ? "bf16" : w.type == WeightType::kFp8 ? "fp8" : "fp8_block";
    name_ = "skinny." + std::string(type) + ".n" + std::to_string(rows_tile);
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
    check(cudaLaunchKernelEx(&config, kernel_.function, w_map_, x_map_, args_, m), "launch of a skinny GEMM");
  }

  int max_rows() const override { return max_rows_; }
  std::string name() const override { return name_; }

 private:
  SkinnyKernel kernel_;
  SkinnyArgs args_;
  CUtensorMap w_map_;
  CUtensorMap x_map_;
  DeviceArray<unsigned> counters_;
  std::string name_;
  int grid_ = 0;
  int shared_bytes_ = 0;
  int max_rows_ = 0;
};

/// CTAs of a cluster for so many tiles: 1 where k does not come apart, else 2 or as many as fill `ctas`.
int cluster_size(int tiles, int per_tile, int ctas) {
  int size = 2;
  while (size < 8 && 2 * size * tiles <= ctas) size *= 2;
  while (per_tile % size != 0) size /= 2;
  return size;
}

/// CTAs that share the units of many tiles: where half tiles come out even, a tile has at most two CTAs.
int even_grid(int tiles, int multiprocessors) {
  for (int grid = multiprocessors; grid > multiprocessors * 9 / 10; --grid) {
    if (2 * tiles % grid == 0) return grid;
  }
  return multiprocessors;
}

/// Rows, columns and stages of a ring of about 100 KB (two CTAs fit on a multiprocessor) or 200 KB.
void set_ring(SkinnyPlan& plan, int rows_tile, bool small_tiles, bool large_ring) {
  plan.rows = small_tiles ? 64 : 128;
  plan.sub = small_tiles ? 2 : 1;
  plan.stages = rows_tile == 8 ? 6 : rows_tile == 16 ? 5 : 4;
  if (large_ring) plan.stages = rows_tile == 8 ? 12 : rows_tile == 16 ? 10 : rows_tile == 32 ? 9 : 8;
}

/// A tile for each CTA and two CTAs on a multiprocessor: one multiplies while the other waits for memory.
void set_single_tiles(SkinnyPlan& plan, int rows_tile, int tiles) {
  set_ring(plan, rows_tile, false, false);
  if (rows_tile == 32) plan.stages = 5;
  plan.grid = tiles;
  plan.whole = true;
}

}  // namespace

// What was fastest on an H200 in layers of Llama-3.1-8B (bench_layer --search), as rules.
SkinnyPlan default_skinny_plan(WeightType type, int n, int k, int rows_tile, int multiprocessors) {
  const bool bf16 = type == WeightType::kBf16;
  const int row_bytes = k * (bf16 ? 2 : 1);
  const int tiles64 = ceil_div(n, 64);
  const int tiles128 = ceil_div(n, 128);
  const bool fills_twice = tiles128 <= 2 * multiprocessors && tiles128 >= multiprocessors * 3 / 2;
  SkinnyPlan plan;
  if (rows_tile == 64) {  // small tiles would read X too often
    set_ring(plan, rows_tile, false, true);
    if (tiles128 <= multiprocessors) {
      plan.cluster = cluster_size(tiles128, ceil_div(row_bytes, 128), multiprocessors * 3 / 4);
      const bool busy = type == WeightType::kFp8Block && 4 * tiles128 <= 2 * multiprocessors;  // with scales
      if (busy && row_bytes % 512 == 0) plan.cluster = 4, plan.stages = 3;
    } else if (!bf16 && fills_twice) {
      set_single_tiles(plan, rows_tile, tiles128);
    }
  } else if (tiles64 <= multiprocessors) {  // a cluster for each tile: its sums do not pass through memory
    plan.cluster = cluster_size(tiles64, ceil_div(row_bytes, 512), multiprocessors);
    const bool large = plan.cluster * tiles64 <= multiprocessors && row_bytes >= 8192;
    set_ring(plan, rows_tile, true, large);
    if (large && rows_tile == 8) plan.sub = 4, plan.stages = 6;
    const bool short_rows = !bf16 && rows_tile == 8 && row_bytes <= 4096 && row_bytes % 1024 == 0;
    if (short_rows && plan.cluster == 2 && 4 * tiles64 <= 2 * multiprocessors) plan.cluster = 4, plan.stages = 3;
  } else if (tiles128 > 4 * multiprocessors) {  // so many that CTAs come and go
    set_ring(plan, rows_tile, false, false);
    if (rows_tile <= 16 && row_bytes % 256 == 0) {
      plan.cluster = 2;
    } else {
      plan.grid = tiles128;
      plan.whole = true;
    }
  } else if (rows_tile == 8 && bf16) {
    plan.rows = 64, plan.sub = 4, plan.stages = 6;
    plan.grid = even_grid(tiles64, multiprocessors);
  } else if (rows_tile == 32 && type == WeightType::kFp8 && fills_twice) {
    set_single_tiles(plan, rows_tile, tiles128);
  } else if (!bf16 && (rows_tile <= 16 || type == WeightType::kFp8Block)) {
    set_ring(plan, rows_tile, false, rows_tile <= 16);
    plan.grid = ceil_div(tiles128, ceil_div(tiles128, multiprocessors));
    plan.whole = plan.grid >= multiprocessors * 3 / 4;
  } else {
    set_ring(plan, rows_tile, true, true);
    plan.grid = even_grid(tiles64, multiprocessors);
  }
  if (!plan.whole && plan.grid < multiprocessors * 3 / 4) plan.grid = multiprocessors;
  plan.early = (rows_tile == 8 ? 256 : 96) * 1024 / (plan.rows * plan.sub * 128);
  return plan;
}

std::unique_ptr<Gemm> make_skinny_gemm(const GemmProblem& problem, int rows_tile, Workspace workspace,
                                       const SkinnyPlan& plan) {
  if (!takes(problem, rows_tile) || !device_has_wgmma()) return nullptr;
  const SkinnyKernel kernel = find_kernel(problem, rows_tile, plan);
  if (kernel.function == nullptr) return nullptr;
  return std::make_unique<SkinnyGemm>(problem, rows_tile, workspace, plan, kernel);
}

std::unique_ptr<Gemm> make_skinny_link(const GemmProblem& problem, const SkinnyLink& link, int rows_tile,
                                       Workspace workspace, const SkinnyPlan& plan) {
  if (!takes(problem, rows_tile) || problem.w.type != WeightType::kFp8 || problem.w.n % 64 != 0) return nullptr;
  const SkinnyKernel kernel = device_has_wgmma() ? find_kernel(problem, rows_tile, plan, true) : SkinnyKernel{};
  if (kernel.function == nullptr) return nullptr;
  return std::make_unique<SkinnyGemm>(problem, rows_tile, workspace, plan, kernel, link);
}

std::unique_ptr<Gemm> make_skinny_gemm(const GemmProblem& problem, int rows_tile, Workspace workspace) {
  if (!takes(problem, rows_tile) || !device_has_wgmma()) return nullptr;
  const Weights& w = problem.w;
  return make_skinny_gemm(
      problem, rows_tile, workspace,
      default_skinny_plan(w.type, w.n, w.k, rows_tile, device_attribute(cudaDevAttrMultiProcessorCount)));
}

}  // namespace aotllm::cuda
