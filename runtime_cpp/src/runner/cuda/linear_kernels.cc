#include "runner/cuda/linear_kernels.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "aotllm/errors.h"
#include "gemm/dequantize.h"
#include "gemm/int_layout.h"
#include "support/strings.h"

namespace aotllm::cuda {
namespace {

/// What deterministic engines compute every linear with, whatever the number of rows: its sums over k have one order.
const char* deterministic_kernel(int sm) {
  return sm < 90 ? "sm80.0" : "tile.0";
}

/// Before the name of the kernel that multiplies by weights made bf16.
constexpr const char* kDequant = "dequant.";

int suffix(const std::string& kernel, std::size_t at) {
  int value = -1;
  std::from_chars(kernel.data() + at, kernel.data() + kernel.size(), value);
  return value;
}

}  // namespace

std::size_t gemm_workspace_bytes(const Plan& plan) {
  std::size_t bytes = kWorkspaceBytes;
  for (const Linear& linear : plan.linears) {
    if (linear.matrix.format != MatrixFormat::kInt8 && linear.matrix.format != MatrixFormat::kInt4) continue;
    if (linear.tactics.empty()) continue;  // of experts, which are never made bf16 in memory
    bytes = std::max(bytes, dequant_workspace_bytes(linear.n, linear.k));
  }
  return bytes;
}

LinearKernels::LinearKernels(Workspace workspace, const std::string& cublaslt, bool deterministic, TacticTable tuned,
                             int sm)
    : workspace_(workspace),
      deterministic_(deterministic),
      tuned_(std::move(tuned)),
      sm_(sm),
      cublaslt_(open_cublaslt(cublaslt)) {}

std::unique_ptr<Gemm> LinearKernels::make(const GemmProblem& problem, const std::string& kernel) const {
  if (kernel.starts_with("int.")) return make_int_gemm(problem, suffix(kernel, 4), workspace_);
  if (kernel.starts_with(kDequant)) {
    return make_dequant_gemm(problem, workspace_, [&](const GemmProblem& inner, Workspace workspace) {
      return make_float(inner, kernel.substr(std::strlen(kDequant)), workspace);
    });
  }
  return make_float(problem, kernel, workspace_);
}

std::unique_ptr<Gemm> LinearKernels::make_float(const GemmProblem& problem, const std::string& kernel,
                                                Workspace workspace) const {
  if (kernel.starts_with("skinny.")) return make_skinny_gemm(problem, suffix(kernel, 7), workspace);
  if (kernel.starts_with("sm80.")) return make_sm80_gemm(problem, suffix(kernel, 5), workspace);
  if (kernel.starts_with("tile.")) {
    const int tile = suffix(kernel, 5);
    return tile >= 0 && tile < num_gemm_tiles() ? make_tile_gemm(problem, tile, workspace) : nullptr;
  }
  if (kernel.starts_with("cublaslt") && cublaslt_ != nullptr) {
    const int candidate = kernel == "cublaslt" ? 0 : suffix(kernel, 9);
    return candidate < 0 ? nullptr : make_cublaslt_gemm(cublaslt_, problem, workspace, candidate);
  }
  return nullptr;
}

/// The first kernel that takes the problem for `rows` rows.
std::unique_ptr<Gemm> LinearKernels::make_any(const GemmProblem& problem, int rows) const {
  const std::string prefix = has_integers(problem.w.type) ? kDequant : "";
  const int tiles = sm_ < 90 ? num_sm80_shapes() : num_gemm_tiles();
  for (int tile = 0; tile < tiles; ++tile) {
    auto gemm = make(problem, cat(prefix, sm_ < 90 ? "sm80." : "tile.", tile));
    if (gemm != nullptr && gemm->max_rows() >= rows) return gemm;
  }
  return make(problem, prefix + "cublaslt");
}

int LinearKernels::add(const GemmProblem& problem, const Linear& linear) {
  std::vector<Choice>& choices = choices_.emplace_back();
  std::vector<Tactic> tactics = tuned_.find(linear);
  if (deterministic_) tactics.clear();
  if (tactics.empty() || tactics.back().max_rows < problem.max_m) {
    const char* prefix = has_integers(problem.w.type) ? kDequant : "";
    tactics.push_back({problem.max_m, cat(prefix, deterministic_kernel(sm_))});
  }
  for (const Tactic& tactic : tactics) {
    const int rows = std::min(tactic.max_rows, problem.max_m);
    auto gemm = make(problem, tactic.kernel);
    if (gemm == nullptr || gemm->max_rows() < rows) gemm = make_any(problem, rows);
    if (gemm == nullptr) {
      throw Error(ErrorKind::kEngineIncompatible,
                  cat("no kernel of this build takes linear \"", linear.name, "\" [", linear.n, ", ", linear.k,
                      "]; build the engine with this version of aotllm"));
    }
    choices.push_back({rows, std::move(gemm)});
    if (rows == problem.max_m) break;
  }
  return static_cast<int>(choices_.size()) - 1;
}

void LinearKernels::launch(int index, int m, const Stream& stream) const {
  const std::vector<Choice>& choices = choices_[static_cast<std::size_t>(index)];
  const auto it = std::find_if(choices.begin(), choices.end(), [m](const Choice& c) { return m <= c.max_rows; });
  if (it == choices.end()) throw Error(ErrorKind::kInternal, cat("a linear is launched for ", m, " rows"));
  it->gemm->launch(m, stream);
}

}  // namespace aotllm::cuda
