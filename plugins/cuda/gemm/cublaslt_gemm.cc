#include <algorithm>
#include <atomic>
#include <bit>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "aotllm/errors.h"
#include "gemm/cublaslt_epilogue.h"
#include "gemm/cublaslt_library.h"
#include "gemm/gemm.h"

namespace aotllm::cuda {
namespace {

using cublaslt::Algorithm;
using cublaslt::Status;

template <class Handle>
using Owner = std::unique_ptr<std::remove_pointer_t<Handle>, Status (*)(Handle)>;

/// The head of the workspace belongs to counters of other kernels, which must stay zero: nothing here touches it.
constexpr std::size_t kCounterBytes = std::size_t{1} << 20;
/// What NVIDIA recommends for Hopper; a gated linear leaves more for its temporary.
constexpr std::size_t kScratchBytes = std::size_t{32} << 20;
constexpr std::size_t kGatedScratchBytes = std::size_t{7} << 20;

/// The parts of the workspace: the library's scratch, then the product of a few rows.
struct Regions {
  std::uint8_t* scratch = nullptr;
  std::size_t scratch_bytes = 0;
  __nv_bfloat16* product = nullptr;  // [rows, n]
  int rows = 0;                      // a multiple of 8; 0 where there is no room
};

Regions divide(const GemmProblem& problem, Workspace workspace) {
  Regions regions;
  if (workspace.bytes <= kCounterBytes) return regions;
  const std::size_t usable = workspace.bytes - kCounterBytes;
  const std::size_t wanted = problem.epilogue == Epilogue::kGated ? kGatedScratchBytes : kScratchBytes;
  regions.scratch = static_cast<std::uint8_t*>(workspace.data) + kCounterBytes;
  regions.scratch_bytes = std::min(wanted, usable / 2 / 256 * 256);
  regions.product = reinterpret_cast<__nv_bfloat16*>(regions.scratch + regions.scratch_bytes);
  const std::size_t rows = (usable - regions.scratch_bytes) / (static_cast<std::size_t>(problem.w.n) * 2);
  const int most = static_cast<int>(std::min(rows, static_cast<std::size_t>(problem.max_m)));
  regions.rows = most >= 128 ? most / 128 * 128 : most / 8 * 8;
  return regions;
}

/// The number of rows that stands for `m` in questions to the heuristic: few enough to ask in time.
int bucket_of(int m, int max_m) {
  const int rounded = m <= 256 ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(m))) : (m + 255) / 256 * 256;
  return std::min(rounded, max_m);
}

std::uint32_t alignment_of(const void* address) {
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  return value == 0 ? 256u : static_cast<std::uint32_t>(std::min<std::uintptr_t>(value & -value, 256));
}

class CublasLtGemm final : public Gemm {
 public:
  CublasLtGemm(std::shared_ptr<CublasLtLibrary> library, const GemmProblem& problem, Workspace workspace, int candidate)
      : library_(std::move(library)), problem_(problem), regions_(divide(problem, workspace)), candidate_(candidate) {}

  void launch(int m, const Stream& stream) const override;
  int max_rows() const override { return problem_.max_m; }
  std::string name() const override { return candidate_ == 0 ? "cublaslt" : "cublaslt." + std::to_string(candidate_); }

  /// Asks the heuristic for `m` rows unless it was asked before; false where the library has no algorithm. Touches no
  /// stream; `launch` calls it where it was not called.
  bool prepare(int m) const { return choice(bucket_of(m, problem_.max_m)).has_value(); }
  bool has_room() const { return problem_.epilogue != Epilogue::kGated || regions_.rows > 0; }

 private:
  /// y [rows, n] = x · Wᵀ, in the library's column-major words D [n, rows] = Aᵀ · B with A = W and B = x.
  struct Operation {
    Owner<cublaslt::MatmulDesc> desc;
    Owner<cublaslt::MatrixLayout> a;
    Owner<cublaslt::MatrixLayout> b;
    Owner<cublaslt::MatrixLayout> d;
  };

  bool is_fp8() const { return problem_.w.type == WeightType::kFp8; }
  Operation make_operation(int first, int rows) const;
  Owner<cublaslt::MatrixLayout> make_layout(int type, int rows, int columns) const;
  std::optional<Algorithm> choice(int rows) const;
  std::optional<Algorithm> ask(int rows) const;
  bool multiply(int first, int rows, void* d, const void* c, const Stream& stream) const;
  void multiply_by_chunks(int m, const Stream& stream) const;
  void finish(int first, int rows, const void* product, bool add_residual, const Stream& stream) const;

  std::shared_ptr<CublasLtLibrary> library_;
  GemmProblem problem_;
  Regions regions_;
  int candidate_;
  mutable std::mutex mutex_;
  mutable std::map<int, std::optional<Algorithm>> choices_;  // by rows asked for
  // The heuristic is not told of beta: that an algorithm cannot add C shows when it is launched.
  mutable std::atomic<bool> residual_by_kernel_{false};
};

Owner<cublaslt::MatrixLayout> CublasLtGemm::make_layout(int type, int rows, int columns) const {
  cublaslt::MatrixLayout layout = nullptr;
  library_->check(library_->functions().matrix_layout_create(&layout, type, static_cast<std::uint64_t>(rows),
                                                             static_cast<std::uint64_t>(columns), rows),
                  "matrix layout");
  return {layout, library_->functions().matrix_layout_destroy};
}

CublasLtGemm::Operation CublasLtGemm::make_operation(int first, int rows) const {
  const cublaslt::Functions& f = library_->functions();
  cublaslt::MatmulDesc desc = nullptr;
  library_->check(f.matmul_desc_create(&desc, cublaslt::kCompute32F, cublaslt::kR32F), "matmul descriptor");
  Owner<cublaslt::MatmulDesc> owner(desc, f.matmul_desc_destroy);
  const auto set = [&](int attribute, auto value) {
    library_->check(f.matmul_desc_set_attribute(desc, attribute, &value, sizeof value), "matmul attribute");
  };
  set(cublaslt::kDescTransA, std::int32_t{cublaslt::kOpTranspose});
  if (is_fp8()) {
    set(cublaslt::kDescFastAccum, std::int8_t{1});
    set(cublaslt::kDescAScaleMode, std::int32_t{cublaslt::kScaleOuterVec32F});
    set(cublaslt::kDescBScaleMode, std::int32_t{cublaslt::kScaleOuterVec32F});
    set(cublaslt::kDescAScalePointer, static_cast<const void*>(problem_.w.scales));
    set(cublaslt::kDescBScalePointer, static_cast<const void*>(problem_.x_scales + first));
  }
  const int in = is_fp8() ? cublaslt::kR8FE4M3 : cublaslt::kR16BF;
  const int out = problem_.epilogue == Epilogue::kLogits ? cublaslt::kR32F : cublaslt::kR16BF;
  return {std::move(owner), make_layout(in, problem_.w.k, problem_.w.n), make_layout(in, problem_.w.k, rows),
          make_layout(out, problem_.w.n, rows)};
}

std::optional<Algorithm> CublasLtGemm::choice(int rows) const {
  const std::lock_guard lock(mutex_);
  const auto known = choices_.find(rows);
  if (known != choices_.end()) return known->second;
  return choices_.emplace(rows, ask(rows)).first->second;
}

std::optional<Algorithm> CublasLtGemm::ask(int rows) const {
  const cublaslt::Functions& f = library_->functions();
  cublaslt::Preference preference = nullptr;
  library_->check(f.preference_create(&preference), "preference");
  const Owner<cublaslt::Preference> owner(preference, f.preference_destroy);
  const auto set = [&](int attribute, auto value) {
    library_->check(f.preference_set_attribute(preference, attribute, &value, sizeof value), "preference attribute");
  };
  const bool residual = problem_.epilogue == Epilogue::kResidual;
  const std::uint32_t d = std::min(alignment_of(problem_.y), 128u);
  set(cublaslt::kPrefMaxWorkspaceBytes, static_cast<std::uint64_t>(regions_.scratch_bytes));
  set(cublaslt::kPrefMinAlignmentA, alignment_of(problem_.w.data));
  set(cublaslt::kPrefMinAlignmentB, std::min(alignment_of(problem_.x), 128u));
  set(cublaslt::kPrefMinAlignmentC, residual ? std::min(alignment_of(problem_.residual), d) : d);
  set(cublaslt::kPrefMinAlignmentD, d);

  const Operation operation = make_operation(0, rows);
  constexpr int kAsked = 16;
  cublaslt::HeuristicResult results[kAsked] = {};
  int found = 0;
  const Status status =
      f.algo_get_heuristic(library_->handle(), operation.desc.get(), operation.a.get(), operation.b.get(),
                           operation.d.get(), operation.d.get(), preference, kAsked, results, &found);
  if (status != cublaslt::kSuccess) return std::nullopt;
  int rank = 0;
  for (int i = 0; i < found; ++i) {
    const bool usable = results[i].state == cublaslt::kSuccess && results[i].workspace_bytes <= regions_.scratch_bytes;
    if (usable && rank++ == candidate_) return results[i].algorithm;
  }
  return std::nullopt;
}

/// False where no algorithm takes the product: nothing has been launched then. `c` is added where it is not null.
bool CublasLtGemm::multiply(int first, int rows, void* d, const void* c, const Stream& stream) const {
  const Operation operation = make_operation(first, rows);
  const std::size_t element = is_fp8() ? 1 : 2;
  const auto* x =
      static_cast<const std::uint8_t*>(problem_.x) + static_cast<std::size_t>(first) * problem_.w.k * element;
  const float alpha = 1.0f;
  const float beta = c != nullptr ? 1.0f : 0.0f;
  // The bucket's algorithm nearly always fits; where it does not, one is asked for that was made for these rows.
  for (const int asked : {bucket_of(rows, problem_.max_m), rows}) {
    const std::optional<Algorithm> algorithm = choice(asked);
    if (!algorithm) continue;
    const Status status = library_->functions().matmul(
        library_->handle(), operation.desc.get(), &alpha, problem_.w.data, operation.a.get(), x, operation.b.get(),
        &beta, c != nullptr ? c : d, operation.d.get(), d, operation.d.get(), &*algorithm, regions_.scratch,
        regions_.scratch_bytes, stream.handle);
    if (status == cublaslt::kSuccess) return true;
    if (status != cublaslt::kNotSupported && status != cublaslt::kInvalidValue) library_->check(status, "matmul");
  }
  return false;
}

void CublasLtGemm::finish(int first, int rows, const void* product, bool add_residual, const Stream& stream) const {
  const int n = problem_.w.n;
  const bool logits = problem_.epilogue == Epilogue::kLogits;
  const bool gated = problem_.epilogue == Epilogue::kGated;
  const float softcap = logits ? problem_.softcap : 0.0f;
  if (!gated && !add_residual && problem_.bias == nullptr && softcap <= 0.0f) return;
  const std::size_t row_bytes = static_cast<std::size_t>(gated ? n / 2 : n) * (logits ? 4 : 2);
  CublasLtEpilogue args;
  args.epilogue = problem_.epilogue;
  args.activation = problem_.activation;
  args.product = product;
  args.bias = problem_.bias;
  if (add_residual) args.residual = problem_.residual + static_cast<std::size_t>(first) * n;
  args.y = static_cast<std::uint8_t*>(problem_.y) + static_cast<std::size_t>(first) * row_bytes;
  args.softcap = softcap;
  args.m = rows;
  args.n = n;
  cublaslt_epilogue(args, stream);
}

void CublasLtGemm::multiply_by_chunks(int m, const Stream& stream) const {
  const int chunks = regions_.rows > 0 ? (m + regions_.rows - 1) / regions_.rows : 0;
  if (chunks == 0) throw Error(ErrorKind::kInternal, "cuBLASLt: the workspace holds no rows of the product");
  // Equal chunks, in whole tiles where there are several.
  const int rows = chunks == 1 ? m : std::min(((m + chunks - 1) / chunks + 127) / 128 * 128, regions_.rows);
  for (int first = 0; first < m; first += rows) {
    const int count = std::min(rows, m - first);
    if (!multiply(first, count, regions_.product, nullptr, stream)) {
      throw Error(ErrorKind::kInternal, "cuBLASLt: no algorithm for " + std::to_string(count) + " rows");
    }
    finish(first, count, regions_.product, problem_.epilogue == Epilogue::kResidual, stream);
  }
}

void CublasLtGemm::launch(int m, const Stream& stream) const {
  if (m < 1 || m > problem_.max_m) {
    throw Error(ErrorKind::kInternal,
                "cuBLASLt: " + std::to_string(m) + " rows, allowed 1 to " + std::to_string(problem_.max_m));
  }
  const bool residual = problem_.epilogue == Epilogue::kResidual;
  const bool direct = problem_.epilogue != Epilogue::kGated && !(residual && residual_by_kernel_);
  if (direct) {
    if (multiply(0, m, problem_.y, residual ? problem_.residual : nullptr, stream)) {
      finish(0, m, problem_.y, false, stream);
      return;
    }
    if (!residual) throw Error(ErrorKind::kInternal, "cuBLASLt: no algorithm for " + std::to_string(m) + " rows");
    residual_by_kernel_ = true;
  }
  multiply_by_chunks(m, stream);
}

}  // namespace

std::unique_ptr<Gemm> make_cublaslt_gemm(const std::shared_ptr<CublasLtLibrary>& library, const GemmProblem& problem,
                                         Workspace workspace, int candidate) {
  const bool fp8 = problem.w.type == WeightType::kFp8;
  if (library == nullptr || !(fp8 || problem.w.type == WeightType::kBf16)) return nullptr;
  if (fp8 && (problem.w.scales == nullptr || problem.x_scales == nullptr)) return nullptr;
  if (problem.epilogue == Epilogue::kGated && problem.w.n % 16 != 0) return nullptr;
  auto gemm = std::make_unique<CublasLtGemm>(library, problem, workspace, candidate);
  if (!gemm->has_room() || !gemm->prepare(1) || !gemm->prepare(problem.max_m)) return nullptr;
  return gemm;
}

}  // namespace aotllm::cuda
