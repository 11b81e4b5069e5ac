#include "comm/nccl_library.h"

#include <dlfcn.h>

#include "aotllm/errors.h"

namespace aotllm::cuda {
namespace {

template <class Function>
void resolve(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function != nullptr) return;
  throw Error(ErrorKind::kEngineIncompatible, std::string("NCCL: the library lacks ") + name + "; use 2.7 or newer");
}

std::shared_ptr<void> load(const std::string& path) {
  const char* name = path.empty() ? "libnccl.so.2" : path.c_str();
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return {library, [](void* loaded) { dlclose(loaded); }};
  const char* reason = dlerror();
  throw Error(ErrorKind::kEngineIncompatible,
              std::string("ranks on GPUs without access to each other's memory need NCCL: cannot load ") + name + ": " +
                  (reason != nullptr ? reason : "no reason given"));
}

}  // namespace

NcclLibrary::NcclLibrary(const std::string& path) : library_(load(path)) {
  resolve(library_.get(), "ncclCommInitAll", functions_.comm_init_all);
  resolve(library_.get(), "ncclCommDestroy", functions_.comm_destroy);
  resolve(library_.get(), "ncclCommAbort", functions_.comm_abort);
  resolve(library_.get(), "ncclSend", functions_.send);
  resolve(library_.get(), "ncclRecv", functions_.recv);
  resolve(library_.get(), "ncclAllGather", functions_.all_gather);
  resolve(library_.get(), "ncclGroupStart", functions_.group_start);
  resolve(library_.get(), "ncclGroupEnd", functions_.group_end);
  resolve(library_.get(), "ncclGetErrorString", functions_.get_error_string);
}

void NcclLibrary::check(nccl::Result result, const char* what) const {
  if (result == nccl::kSuccess) return;
  throw Error(ErrorKind::kInternal, std::string("NCCL: ") + what + ": " + functions_.get_error_string(result));
}

}  // namespace aotllm::cuda
