#pragma once

#include <functional>

#include "gemm/gemm.h"

namespace aotllm::cuda {

/// out = bf16(scale · (u − zero)) [n, k], rows contiguous; `w` is kInt8 or kInt4 of a shape that int_shape takes.
void dequantize(const Weights& w, __nv_bfloat16* out, const Stream& stream);

/// For many rows: `dequantize` into the workspace beyond its first kWorkspaceBytes, then a GEMM of bf16 weights, which
/// `make_inner` makes of a problem and the workspace's first kWorkspaceBytes. Null where W is not kInt8 or kInt4, the
/// workspace is too small for it, or the inner GEMM does not take the problem.
using MakeGemm = std::function<std::unique_ptr<Gemm>(const GemmProblem&, Workspace)>;
std::unique_ptr<Gemm> make_dequant_gemm(const GemmProblem& problem, Workspace workspace, const MakeGemm& make_inner);

/// Workspace that make_dequant_gemm needs for such weights.
std::size_t dequant_workspace_bytes(int n, int k);

}  // namespace aotllm::cuda
