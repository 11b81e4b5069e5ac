#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "gemm/gemm.h"
#include "launch.h"

// A mixture of experts: each row of x goes to the `top_k` experts that its router logits favour. A *pair* is a (row,
// slot); pairs are numbered row · top_k + slot, and *places* number them again sorted by expert, then row. All pointers
// are on the device; rows are contiguous and 16-byte aligned.
namespace aotllm::cuda {

inline constexpr int kMoeMaxExperts = 512;
inline constexpr int kMoeMaxTopK = 16;
/// Of tiles of experts in integers: from here on they have the same results.
inline constexpr int kMoeAlikeIntTokens = 32;
inline constexpr int kMoeMostIntTokens = 128;

/// The expert that a tile of places belongs to: its tiles are [first_tile, first_tile + ceil(count / tokens)).
struct alignas(16) MoeTile {
  std::int32_t expert;
  std::int32_t first_place;  ///< of the expert
  std::int32_t count;        ///< places of the expert
  std::int32_t first_tile;
};

/// Where a routing is written, and read by what follows.
struct MoeRouting {
  std::int32_t* experts = nullptr;   ///< [m, top_k], ascending
  float* weights = nullptr;          ///< [m, top_k]
  std::int32_t* places = nullptr;    ///< [m · top_k], of pairs
  std::int32_t* rows = nullptr;      ///< [m · top_k], of places
  float* row_scales = nullptr;       ///< [m · top_k], of places: x_scales of their rows; unused where there are none
  MoeTile* tiles = nullptr;          ///< [moe_max_tiles]
  std::uint32_t* members = nullptr;  ///< [moe_members], scratch
  std::int32_t* counters = nullptr;  ///< [2]: tiles that there are; arrivals of blocks, zero before and after
};

/// Words of MoeRouting::members for m rows.
std::size_t moe_members(int m, int num_experts);
/// Places of a tile for m rows: what the experts' GEMMs are fastest with if rows spread evenly. Results do not depend
/// on it, but for rounding where experts are integers and tiles have fewer than kMoeAlikeIntTokens.
int moe_tile_tokens(int m, int num_experts, int top_k, WeightType type);
/// The most tiles that any routing of m rows has.
int moe_max_tiles(int m, int num_experts, int top_k, int tokens);

struct MoeRouteArgs {
  const __nv_bfloat16* x = nullptr;  ///< [m, width], after the norm
  const float* x_scales = nullptr;   ///< [m], of FP8 codes of the same rows; null = none
  const float* router = nullptr;     ///< [num_experts, width]
  int m = 0;
  int width = 0;  ///< a multiple of 8
  int num_experts = 0;
  int top_k = 0;
  bool normalize = false;  ///< weights of a row sum to 1
  int tokens = 0;          ///< moe_tile_tokens
  /// [m] or null: rows where it is negative are padding and take the experts of row 0, whose weights are read anyway.
  const std::int32_t* sequences = nullptr;
  float* logits = nullptr;  ///< [m, num_experts], scratch
  MoeRouting routing;
};
/// Weights are softmax(router · x) over all experts, of the top_k largest; ties go to the lower id. Products are exact,
/// sums float32, so that the result of a row does not depend on other rows. One kernel up to 64 rows, else three.
void moe_route(const MoeRouteArgs& args, const Stream& stream);

/// y = W_e · x for the rows of each expert e. kBf16, kFp8 (activations as codes with a scale per row), kInt8 and kInt4.
struct MoeGemmProblem {
  Weights w;  ///< of all experts, one after another: w.n rows are one expert's; a multiple of 16, of
              ///< integers of 64: blocks do not cross experts
  int num_experts = 0;
  const void* x = nullptr;               ///< [rows, k]
  bool gathers = false;                  ///< place p reads row routing.rows[p] of x; else row p
  const float* x_scales = nullptr;       ///< kFp8: [places]
  Epilogue epilogue = Epilogue::kStore;  ///< or kGated
  Activation activation = Activation::kSilu;
  __nv_bfloat16* y = nullptr;  ///< [places, n], kGated: [places, n / 2]
  /// The kernel before this one waited for the routing before it let this one start: tiles are read, and weights
  /// loaded, before that one has ended. True after the GEMM that gathers.
  bool tiles_known = false;
};

class MoeGemm {
 public:
  /// Throws Error(kInternal) for a problem that no kernel takes, Error(kEngineIncompatible) on other GPUs than SM 9.0.
  explicit MoeGemm(const MoeGemmProblem& problem);

  /// For a routing of `pairs` pairs in tiles of `tokens`.
  void launch(const MoeRouting& routing, int pairs, int tokens, const Stream& stream) const;

 private:
  MoeGemmProblem problem_;
  CUtensorMap w_map_{};
};

/// out[row] = residual[row] + Σ weights[row, slot] · y[places[row, slot]] over slots in order, that
/// is by expert, in float32, rounded once.
struct MoeCombineArgs {
  const __nv_bfloat16* y = nullptr;         ///< [places, width]
  const __nv_bfloat16* residual = nullptr;  ///< [m, width], or null
  __nv_bfloat16* out = nullptr;             ///< [m, width]; may be the residual's memory
  int m = 0;
  int width = 0;
  int top_k = 0;
  MoeRouting routing;
};
void moe_combine(const MoeCombineArgs& args, const Stream& stream);

}  // namespace aotllm::cuda
