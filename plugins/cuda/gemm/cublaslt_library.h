#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

// The part of cuBLASLt's C interface that GEMMs use, declared here so that neither its headers nor the library itself
// are needed to build; names without their prefix, values as in cublasLt.h of CUDA 12.9 and 13.
namespace aotllm::cuda {

namespace cublaslt {

using Handle = struct HandleTag*;
using MatrixLayout = struct MatrixLayoutTag*;
using MatmulDesc = struct MatmulDescTag*;
using Preference = struct PreferenceTag*;
using Status = int;

inline constexpr Status kSuccess = 0;
inline constexpr Status kInvalidValue = 7;
inline constexpr Status kNotSupported = 15;
inline constexpr int kCompute32F = 68;  // cublasComputeType_t
inline constexpr int kOpTranspose = 1;  // cublasOperation_t

enum DataType : int {  // cudaDataType_t
  kR32F = 0,
  kR16BF = 14,
  kR8FE4M3 = 28,
};

enum MatmulDescAttribute : int {
  kDescTransA = 3,          // int32
  kDescAScalePointer = 17,  // const void*
  kDescBScalePointer = 18,
  kDescFastAccum = 25,   // int8
  kDescAScaleMode = 31,  // int32, ScaleMode
  kDescBScaleMode = 32,
};

enum ScaleMode : std::int32_t {
  kScaleOuterVec32F = 3,  // a float32 for each row of A, or column of B
};

enum PreferenceAttribute : int {
  kPrefMaxWorkspaceBytes = 1,  // uint64
  kPrefMinAlignmentA = 5,      // uint32, bytes
  kPrefMinAlignmentB = 6,
  kPrefMinAlignmentC = 7,
  kPrefMinAlignmentD = 8,
};

struct Algorithm {  // cublasLtMatmulAlgo_t
  std::uint64_t data[8];
};

struct HeuristicResult {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  std::size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

/// Entry points, by the names of the C interface.
struct Functions {
  Status (*create)(Handle*) = nullptr;
  Status (*destroy)(Handle) = nullptr;
  std::size_t (*get_version)() = nullptr;
  const char* (*get_status_string)(Status) = nullptr;
  Status (*matrix_layout_create)(MatrixLayout*, int type, std::uint64_t rows, std::uint64_t cols,
                                 std::int64_t ld) = nullptr;
  Status (*matrix_layout_destroy)(MatrixLayout) = nullptr;
  Status (*matmul_desc_create)(MatmulDesc*, int compute_type, int scale_type) = nullptr;
  Status (*matmul_desc_destroy)(MatmulDesc) = nullptr;
  Status (*matmul_desc_set_attribute)(MatmulDesc, int, const void*, std::size_t) = nullptr;
  Status (*preference_create)(Preference*) = nullptr;
  Status (*preference_destroy)(Preference) = nullptr;
  Status (*preference_set_attribute)(Preference, int, const void*, std::size_t) = nullptr;
  Status (*algo_get_heuristic)(Handle, MatmulDesc, MatrixLayout a, MatrixLayout b, MatrixLayout c, MatrixLayout d,
                               Preference, int requested, HeuristicResult*, int* returned) = nullptr;
  Status (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout, const void* b, MatrixLayout,
                   const void* beta, const void* c, MatrixLayout, void* d, MatrixLayout, const Algorithm*,
                   void* workspace, std::size_t workspace_bytes, cudaStream_t) = nullptr;
};

}  // namespace cublaslt

/// A loaded libcublasLt with a handle for the device that was current when it was opened. GEMMs keep it alive.
/// All members may be used from several threads.
class CublasLtLibrary {
 public:
  /// Takes over `library` (of dlopen). Throws Error(kEngineIncompatible) where a function is missing, kInternal where
  /// no handle can be made.
  explicit CublasLtLibrary(std::shared_ptr<void> library);
  ~CublasLtLibrary();
  CublasLtLibrary(const CublasLtLibrary&) = delete;
  CublasLtLibrary& operator=(const CublasLtLibrary&) = delete;

  const cublaslt::Functions& functions() const noexcept { return functions_; }
  cublaslt::Handle handle() const noexcept { return handle_; }
  /// E.g. 130100 for 13.1.0.
  std::size_t version() const { return functions_.get_version(); }
  /// Throws Error(kInternal) naming `what` where `status` is a failure.
  void check(cublaslt::Status status, const char* what) const;

 private:
  std::shared_ptr<void> library_;
  cublaslt::Functions functions_;
  cublaslt::Handle handle_ = nullptr;
};

/// Loads cuBLASLt for the current device. Without a path, libcublasLt.so.13 and .12 are looked for where the dynamic
/// linker looks; null where there is neither. A path that cannot be loaded throws Error(kEngineIncompatible).
std::shared_ptr<CublasLtLibrary> open_cublaslt(const std::string& path = {});

}  // namespace aotllm::cuda
