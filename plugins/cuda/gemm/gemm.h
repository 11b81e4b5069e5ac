#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "launch.h"

namespace aotllm::cuda {

/// How a matrix W [n, k] is stored: rows contiguous along k, but kInt8 and kInt4 in blocks (`gemm/int_layout.h`;
/// `docs/engine_format.md`, "Target `cuda`").
enum class WeightType : std::uint8_t {
  kBf16,      ///< bf16 [n, k]
  kFp8,       ///< E4M3 [n, k], one float32 scale per row
  kFp8Block,  ///< E4M3 [n, k], one float32 scale per 128 × 128 block: [ceil(n / 128), ceil(k / 128)]
  kInt8,      ///< w = scale · code, or in groups of 32 along k scale · (u − zero); activations stay bf16
  kInt4,      ///< w = scale · (u − zero), 0 ≤ u ≤ 15, in groups of 32 or 128 along k; likewise
};

struct Weights {
  WeightType type = WeightType::kBf16;
  int n = 0;
  int k = 0;
  const void* data = nullptr;  ///< device, 256-byte aligned
  const float* scales =
      nullptr;  ///< device; see WeightType. In groups: [ceil(n / 64)][ceil(k / 128) · 128 / group][64]
  const std::uint8_t* zeros = nullptr;  ///< device; of groups, in the order of their scales
  int group = 0;  ///< columns that share scale and zero; kInt4: 32 or 128, kInt8: 32, or 0 = the whole row, no zeros
};

/// What becomes of a product p = W · x (+ bias).
enum class Epilogue : std::uint8_t {
  kStore,     ///< y = p as bf16
  kResidual,  ///< y = residual + p as bf16; y may be the same memory as residual
  kGated,   ///< y[j] = act(gate_j) · up_j as bf16 [n / 2]; rows of W in groups of 16: 8 of gate, then the same 8 of up
  kLogits,  ///< y = softcap(p) as float32
};

enum class Activation : std::uint8_t { kSilu, kGeluTanh };

/// One linear in its place: all addresses are fixed when the engine is loaded, only the number of rows varies.
struct GemmProblem {
  Weights w;
  const void* x = nullptr;          ///< bf16 [max_m, k]; for kFp8 and kFp8Block E4M3 [max_m, k]; 128-byte aligned
  const float* x_scales = nullptr;  ///< kFp8: [max_m], kFp8Block: [max_m, k / 128]; x = code · scale
  int max_m = 0;                    ///< rows of x, y and residual that may be touched; a multiple of 8
  const float* bias = nullptr;      ///< [n] or null
  Epilogue epilogue = Epilogue::kStore;
  Activation activation = Activation::kSilu;  ///< of kGated
  const __nv_bfloat16* residual = nullptr;    ///< kResidual: [max_m, n]
  void* y = nullptr;                          ///< [max_m, n], kGated: [max_m, n / 2]; 128-byte aligned
  float softcap = 0.0f;                       ///< kLogits: y = softcap · tanh(p / softcap) where > 0
};

/// Scratch that GEMMs share in turn. Zeroed when it is made; a kernel leaves the counters that it uses zero.
struct Workspace {
  void* data = nullptr;  ///< device, 256-byte aligned
  std::size_t bytes = 0;
};
inline constexpr std::size_t kWorkspaceBytes = std::size_t{64} << 20;

/// A linear with the kernel chosen for it. Rows ≥ m of x may hold anything (they lie in planned memory); rows ≥ m of y
/// stay as they are.
class Gemm {
 public:
  virtual ~Gemm() = default;

  /// y = f(W · x) for the first `m` rows, 1 ≤ m ≤ max_rows().
  virtual void launch(int m, const Stream& stream) const = 0;

  virtual int max_rows() const = 0;
  /// E.g. "skinny.bf16.n64": what plans, tables and benchmarks call the tactic.
  virtual std::string name() const = 0;
};

/// Streams the weights once for up to 64 rows (operands swapped: rows of W are the M of the tensor cores). Takes kBf16,
/// kFp8 and kFp8Block with every epilogue; n and k multiples of 16 (bf16) or 32. `rows_tile` (8, 16, 32 or 64) is the
/// most rows of a launch. Null where the problem is not one of these.
std::unique_ptr<Gemm> make_skinny_gemm(const GemmProblem& problem, int rows_tile, Workspace workspace);

/// The same for kInt8 and kInt4: codes become bf16 exactly, float32 sums over a group are what scales multiply. n and k
/// multiples of 16.
std::unique_ptr<Gemm> make_int_gemm(const GemmProblem& problem, int rows_tile, Workspace workspace);

/// Warp-specialised, for many rows; the same types and epilogues. `tile` is an index into its list of tile shapes.
/// Null where the problem is not one of these.
std::unique_ptr<Gemm> make_tile_gemm(const GemmProblem& problem, int tile, Workspace workspace);
int num_gemm_tiles();

/// For any number of rows with what SM80 has (mma.sync, cp.async), so for every later GPU: kBf16, and kFp8 from SM89
/// on, with every epilogue; n and k multiples of 16 (bf16) or 32. `shape` is an index into its list of tile shapes; the
/// sums over k of shape 0 have one order whatever the number of rows. Null where the problem is not one of these.
std::unique_ptr<Gemm> make_sm80_gemm(const GemmProblem& problem, int shape, Workspace workspace);
int num_sm80_shapes();

class CublasLtLibrary;  // gemm/cublaslt_library.h

/// NVIDIA's cuBLASLt, from a library found at run time: kBf16 and kFp8, any epilogue (those that the library lacks are
/// a second kernel, over a temporary in the workspace where need be). Of the algorithms that its heuristic offers,
/// `candidate` (from 0, the best in its view) is taken. Null where there is no library or no such algorithm.
std::unique_ptr<Gemm> make_cublaslt_gemm(const std::shared_ptr<CublasLtLibrary>& library, const GemmProblem& problem,
                                         Workspace workspace, int candidate = 0);

}  // namespace aotllm::cuda
