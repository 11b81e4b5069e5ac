#include "runner/cuda/linear_kernels.h"

#include <algorithm>
#include <charconv>

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm::cuda {
namespace {

/// What deterministic engines compute every linear with, whatever the number of rows: its sums over k have one order.
constexpr const char* kDeterministicKernel = "tile.0";

int suffix(const std::string& kernel, std::size_t at) {
  int value = -1;
  std::from_chars(kernel.data() + at, kernel.data() + kernel.size(), value);
  return value;
}

}  // namespace

LinearKernels::LinearKernels(Workspace workspace, const std::string& cublaslt, bool deterministic, TacticTable tuned)
    : workspace_(workspace),
      deterministic_(deterministic),
      tuned_(std::move(tuned)),
      cublaslt_(open_cublaslt(cublaslt)) {}

std::unique_ptr<Gemm> LinearKernels::make(const GemmProblem& problem, const std::string& kernel) const {
  if (kernel.starts_with("skinny.")) return make_skinny_gemm(problem, suffix(kernel, 7), workspace_);
  if (kernel.starts_with("tile.")) {
    const int tile = suffix(kernel, 5);
    return tile >= 0 && tile < num_gemm_tiles() ? make_tile_gemm(problem, tile, workspace_) : nullptr;
  }
  if (kernel.starts_with("cublaslt") && cublaslt_ != nullptr) {
    const int candidate = kernel == "cublaslt" ? 0 : suffix(kernel, 9);
    return candidate < 0 ? nullptr : make_cublaslt_gemm(cublaslt_, problem, workspace_, candidate);
  }
  return nullptr;
}

/// The first kernel that takes the problem for `rows` rows.
std::unique_ptr<Gemm> LinearKernels::make_any(const GemmProblem& problem, int rows) const {
  for (int tile = 0; tile < num_gemm_tiles(); ++tile) {
    auto gemm = make_tile_gemm(problem, tile, workspace_);
    if (gemm != nullptr && gemm->max_rows() >= rows) return gemm;
  }
  return cublaslt_ != nullptr ? make_cublaslt_gemm(cublaslt_, problem, workspace_) : nullptr;
}

int LinearKernels::add(const GemmProblem& problem, const Linear& linear) {
  std::vector<Choice>& choices = choices_.emplace_back();
  std::vector<Tactic> tactics = tuned_.find(linear);
  if (deterministic_) tactics.clear();
  if (tactics.empty() || tactics.back().max_rows < problem.max_m) {
    tactics.push_back({problem.max_m, kDeterministicKernel});
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
