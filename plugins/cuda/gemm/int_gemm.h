#pragma once

#include <cuda.h>

#include <memory>

#include "gemm/gemm.h"
#include "gemm/int_layout.h"
#include "gemm/skinny_split.h"

// What make_int_gemm decides, for tests and benchmarks that want to decide otherwise.
namespace aotllm::cuda {

inline constexpr int kIntMaxStages = 16;

/// The shape of one kernel and of one launch of it.
struct IntPlan {
  int rows = 128;      ///< of W of a tile: 64 or 128
  int sub = 1;         ///< blocks of 128 columns of a stage
  int stages = 5;      ///< of the ring in shared memory, at most kIntMaxStages and what fits
  int grid = 0;        ///< CTAs; 0 = one per multiprocessor
  bool whole = false;  ///< CTAs get whole tiles instead of sharing them; `grid` must not exceed the tiles
  int cluster = 1;     ///< > 1: so many CTAs (2, 4 or 8) share each tile and the grid is theirs, whatever `grid` says
  int early = 0;       ///< units before the end of its loads at which a CTA lets the successor start
  int prefetch = 0;    ///< stages that are fetched to the L2 beyond the ring before the predecessor has ended
};

/// What a launch needs besides the tensor map of x. Shapes as in GemmProblem.
struct IntArgs {
  SkinnySplit split;  ///< units of rows × stage
  int n = 0;
  IntBlocks w;
  int stages = 0;
  int cluster = 1;
  int early = 0;
  int prefetch = 0;
  const float* bias = nullptr;
  const __nv_bfloat16* residual = nullptr;
  void* y = nullptr;
  float softcap = 0.0f;
  Epilogue epilogue = Epilogue::kStore;
  Activation activation = Activation::kSilu;
  float4* partials = nullptr;    ///< [2 × grid slots][kTokens / 8][consumer threads]
  unsigned* counters = nullptr;  ///< [tiles], arrived shares of a tile; zero between launches
};

/// One instantiation and what launching it takes.
struct IntKernel {
  void (*function)(CUtensorMap x, IntArgs args, int m) = nullptr;  ///< null: no such kernel
  int threads = 0;
  int consumers = 0;
  int stage_bytes = 0;
  int fixed_bytes = 0;
  int partial_bytes = 0;
};
IntKernel int_kernel_int4_group128(int rows_tile, int rows, int sub);
IntKernel int_kernel_int4_group32(int rows_tile, int rows, int sub);
IntKernel int_kernel_int8_row(int rows_tile, int rows, int sub);
IntKernel int_kernel_int8_group32(int rows_tile, int rows, int sub);

/// The plan of make_int_gemm without one; `sub` counts blocks of 128 columns.
IntPlan default_int_plan(const IntShape& shape, int rows_tile, int multiprocessors);
std::unique_ptr<Gemm> make_int_gemm(const GemmProblem& problem, int rows_tile, Workspace workspace,
                                    const IntPlan& plan);

}  // namespace aotllm::cuda
