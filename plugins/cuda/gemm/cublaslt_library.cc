#include "gemm/cublaslt_library.h"

#include <dlfcn.h>

#include <utility>

#include "aotllm/errors.h"

namespace aotllm::cuda {
namespace {

template <class Function>
void resolve(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function != nullptr) return;
  throw Error(ErrorKind::kEngineIncompatible,
              std::string("cuBLASLt: the library lacks ") + name + "; use one of CUDA 12.9 or newer");
}

cublaslt::Functions resolve_all(void* library) {
  cublaslt::Functions f;
  resolve(library, "cublasLtCreate", f.create);
  resolve(library, "cublasLtDestroy", f.destroy);
  resolve(library, "cublasLtGetVersion", f.get_version);
  resolve(library, "cublasLtGetStatusString", f.get_status_string);
  resolve(library, "cublasLtMatrixLayoutCreate", f.matrix_layout_create);
  resolve(library, "cublasLtMatrixLayoutDestroy", f.matrix_layout_destroy);
  resolve(library, "cublasLtMatmulDescCreate", f.matmul_desc_create);
  resolve(library, "cublasLtMatmulDescDestroy", f.matmul_desc_destroy);
  resolve(library, "cublasLtMatmulDescSetAttribute", f.matmul_desc_set_attribute);
  resolve(library, "cublasLtMatmulPreferenceCreate", f.preference_create);
  resolve(library, "cublasLtMatmulPreferenceDestroy", f.preference_destroy);
  resolve(library, "cublasLtMatmulPreferenceSetAttribute", f.preference_set_attribute);
  resolve(library, "cublasLtMatmulAlgoGetHeuristic", f.algo_get_heuristic);
  resolve(library, "cublasLtMatmul", f.matmul);
  return f;
}

std::shared_ptr<void> load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  return {library, [](void* loaded) { dlclose(loaded); }};
}

}  // namespace

CublasLtLibrary::CublasLtLibrary(std::shared_ptr<void> library)
    : library_(std::move(library)), functions_(resolve_all(library_.get())) {
  check(functions_.create(&handle_), "cublasLtCreate");
}

CublasLtLibrary::~CublasLtLibrary() {
  functions_.destroy(handle_);
}

void CublasLtLibrary::check(cublaslt::Status status, const char* what) const {
  if (status == cublaslt::kSuccess) return;
  throw Error(ErrorKind::kInternal, std::string("cuBLASLt: ") + what + ": " + functions_.get_status_string(status));
}

std::shared_ptr<CublasLtLibrary> open_cublaslt(const std::string& path) {
  if (!path.empty()) {
    std::shared_ptr<void> library = load(path);
    if (library != nullptr) return std::make_shared<CublasLtLibrary>(std::move(library));
    const char* reason = dlerror();
    throw Error(ErrorKind::kEngineIncompatible,
                "cuBLASLt: cannot load " + path + ": " + (reason != nullptr ? reason : "no reason given"));
  }
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    std::shared_ptr<void> library = load(name);
    if (library != nullptr) return std::make_shared<CublasLtLibrary>(std::move(library));
  }
  return nullptr;
}

}  // namespace aotllm::cuda
