#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "engine/plan.h"
#include "gemm/cublaslt_library.h"
#include "gemm/gemm.h"
#include "runner/cuda/tactic_table.h"

namespace aotllm::cuda {

/// Whether what a linear multiplies comes as E4M3 codes.
inline bool takes_codes(const Linear& linear) {
  return linear.matrix.format == MatrixFormat::kFp8 || linear.matrix.format == MatrixFormat::kFp8Block;
}

inline Activation activation_of(cpu::Activation activation) {
  return activation == cpu::Activation::kSilu ? Activation::kSilu : Activation::kGeluTanh;
}

/// Scratch that the GEMMs of a plan need: where it has matrices of integers, as much more as the largest takes in bf16.
std::size_t gemm_workspace_bytes(const Plan& plan);

/// The kernels of all linears, each chosen by the number of rows as the plan's tactics say.
class LinearKernels {
 public:
  /// For plans of `sm`.
  LinearKernels(Workspace workspace, const std::string& cublaslt, bool deterministic, TacticTable tuned, int sm);

  /// Makes the kernels of a linear in its place; returns its index. Throws Error(kEngineIncompatible) where no kernel
  /// of this build takes it.
  int add(const GemmProblem& problem, const Linear& linear);

  void launch(int index, int m, const Stream& stream) const;

  /// The kernel of this name for a problem; null where there is none or it does not take the problem.
  std::unique_ptr<Gemm> make(const GemmProblem& problem, const std::string& kernel) const;

  int sm() const noexcept { return sm_; }

 private:
  struct Choice {
    int max_rows = 0;
    std::unique_ptr<Gemm> gemm;
  };

  std::unique_ptr<Gemm> make_float(const GemmProblem& problem, const std::string& kernel, Workspace workspace) const;
  std::unique_ptr<Gemm> make_any(const GemmProblem& problem, int rows) const;

  Workspace workspace_;
  bool deterministic_;
  TacticTable tuned_;
  int sm_;
  std::shared_ptr<CublasLtLibrary> cublaslt_;  ///< null = not there
  std::vector<std::vector<Choice>> choices_;
};

}  // namespace aotllm::cuda
