#pragma once

#include <cuda.h>

#include <memory>

#include "gemm/gemm.h"
#include "gemm/skinny_split.h"
#include "group_codes.h"

// What make_skinny_gemm decides, for tests and benchmarks that want to decide otherwise.
namespace aotllm::cuda {

inline constexpr int kSkinnyMaxStages = 16;

/// The shape of one kernel and of one launch of it.
struct SkinnyPlan {
  int rows = 128;      ///< rows of W of a tile: 64 or 128
  int sub = 1;         ///< 128-byte columns of a stage
  int stages = 5;      ///< of the ring in shared memory, at most kSkinnyMaxStages and what fits
  int grid = 0;        ///< CTAs; 0 = one per multiprocessor
  bool whole = false;  ///< CTAs get whole tiles instead of sharing them; `grid` must not exceed the tiles
  int cluster = 1;     ///< so many CTAs (1, 2, 4 or 8), in one cluster, share the k of each tile; where there are
                       ///< clusters the grid is what all tiles need, whatever `grid` says
  int early = 0;       ///< units before the end of its loads at which a CTA lets the successor start
  int prefetch = 0;    ///< stages that are fetched to the L2 beyond the ring before the predecessor has ended; no
                       ///< default plan does, it has not shortened a layer
};

/// A product as a link of a chain (gemm/layer_gemms.h): X are codes in groups, and what becomes of it goes on to the
/// next link, with no norm and no quantization between them.
struct SkinnyLink {
  int normed_tiles = 0;  ///< x is to be divided by its rms: squares come from so many tiles of 64 rows; 0 = it is not
  float normed_width = 0.0f;
  float eps = 0.0f;
  const float* squares = nullptr;  ///< of x: [normed_tiles, rows_tile]

  const float* next_norm = nullptr;  ///< kResidual: weights of the norm that follows
  float* next_squares = nullptr;     ///< kResidual: [n / 64, rows_tile]
  GroupCodes next;                   ///< none = nothing follows; scale_rows is rows_tile
};

/// What a launch needs besides its tensor maps. Shapes as in GemmProblem.
struct SkinnyArgs {
  SkinnySplit split;  ///< units of rows × stage
  int n = 0;
  int stages = 0;
  int cluster = 1;
  int early = 0;
  int prefetch = 0;
  int k_blocks = 0;  ///< ceil(k / 128): columns of the scales of kFp8Block
  const float* w_scales = nullptr;
  const float* x_scales = nullptr;
  const float* bias = nullptr;
  const __nv_bfloat16* residual = nullptr;
  void* y = nullptr;
  float softcap = 0.0f;
  Epilogue epilogue = Epilogue::kStore;
  Activation activation = Activation::kSilu;
  SkinnyLink link;             ///< of chained kernels, whose x_scales are [k / kCodeGroup, rows_tile], for whole stages
  float4* partials = nullptr;  ///< [2 × grid slots][kTokens / 8][consumer threads]
  unsigned* counters = nullptr;  ///< [tiles], arrived shares of a tile; zero between launches
};

/// What a kernel knows of its launches when it is compiled. A multiprocessor fetches a kernel's instructions anew at
/// each launch, so that code which is not there saves microseconds where there are few rows.
struct SkinnyRole {
  bool is_known = false;  ///< false: it looks at its arguments instead
  Epilogue epilogue = Epilogue::kStore;
  bool clusters = false;  ///< CTAs of a cluster share tiles
  bool chained = false;   ///< it is a link of a chain
};

/// One instantiation and what launching it takes.
struct SkinnyKernel {
  void (*function)(CUtensorMap w, CUtensorMap x, SkinnyArgs args, int m) = nullptr;  ///< null: no such kernel
  int threads = 0;
  int stage_bytes = 0;    ///< with the scales beside the ring
  int scale_bytes = 0;    ///< of these
  int fixed_bytes = 0;    ///< shared memory besides the ring
  int group_bytes = 0;    ///< shared memory for the sums of 8 tokens
  int piece = 0;          ///< such groups that a CTA without a cluster finishes at a time
  int partial_bytes = 0;  ///< of one slot of `partials`
};
SkinnyKernel skinny_kernel_bf16(int rows_tile, int rows, int sub, SkinnyRole role);
SkinnyKernel skinny_kernel_fp8(int rows_tile, int rows, int sub, SkinnyRole role);
SkinnyKernel skinny_kernel_chained(int rows_tile, int rows, int sub, SkinnyRole role);  ///< rows_tile 8 or 16
SkinnyKernel skinny_kernel_fp8_block(int rows_tile, int rows, int sub, SkinnyRole role);

/// The plan of make_skinny_gemm without one: rules, from measurements on an H200.
SkinnyPlan default_skinny_plan(WeightType type, int n, int k, int rows_tile, int multiprocessors);
std::unique_ptr<Gemm> make_skinny_gemm(const GemmProblem& problem, int rows_tile, Workspace workspace,
                                       const SkinnyPlan& plan);
/// A link: kFp8, rows_tile 8 or 16, n a multiple of 64.
std::unique_ptr<Gemm> make_skinny_link(const GemmProblem& problem, const SkinnyLink& link, int rows_tile,
                                       Workspace workspace, const SkinnyPlan& plan);

}  // namespace aotllm::cuda
