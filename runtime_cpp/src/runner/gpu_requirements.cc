#include "runner/gpu_requirements.h"

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

std::string version_text(int version) {
  return cat(version / 1000, '.', version % 1000 / 10);
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kEngineIncompatible, message);
}

void check_driver(const GpuMachine& machine) {
  if (machine.driver_version == 0) {
    refuse(
        "the engine needs an NVIDIA GPU, and no NVIDIA driver is installed here; build it with --target cpu or run "
        "it on a machine with a GPU");
  }
  if (machine.driver_version / 1000 < machine.runtime_version / 1000) {
    refuse(cat("the engine needs a driver for CUDA ", machine.runtime_version / 1000, ", the one here is for CUDA ",
               version_text(machine.driver_version), "; install a newer NVIDIA driver"));
  }
}

}  // namespace

void check_gpu_requirements(const GpuMachine& machine, int ordinal, int sm) {
  if (sm != 80 && sm != 89 && sm != 90) {
    refuse(cat("the engine is for SM", sm,
               ", aotllm has kernels for SM80, SM89 and SM90; build the engine with --sm 80, 89 "
               "or 90"));
  }
  check_driver(machine);
  if (machine.device_count == 0) {
    if (!machine.device_error.empty()) {
      refuse(cat("the engine needs an NVIDIA GPU, and the driver opens none: ", machine.device_error,
                 "; see what nvidia-smi says, or build the engine with --target cpu"));
    }
    refuse(
        "the engine needs an NVIDIA GPU, and the driver finds none; build it with --target cpu, or check "
        "CUDA_VISIBLE_DEVICES");
  }
  if (ordinal < 0 || ordinal >= machine.device_count) {
    throw Error(ErrorKind::kInvalidRequest, cat("device: expected 0 to ", machine.device_count - 1, ", got ", ordinal),
                "device");
  }
  const bool later_too = sm < 90;  // what is for SM90 uses instructions that no other device has
  if (later_too ? machine.sm < sm : machine.sm != sm) {
    refuse(cat("the engine is for SM", sm, ", device ", ordinal, " has SM", machine.sm, " (", machine.name,
               "); run it on an SM", sm, " GPU", later_too ? " or a later one" : "", ", or build it with --sm ",
               machine.sm >= 89 ? 89 : 80));
  }
  if (machine.kernel_sm < sm) {
    refuse(cat("the engine is for SM", sm, ", and this build of aotllm has ",
               machine.kernel_sm == 0 ? std::string("no kernels") : cat("kernels of SM", machine.kernel_sm, " only"),
               " for device ", ordinal, " (", machine.name, "); install one built with SM", sm,
               " among its AOTLLM_CUDA_ARCHS"));
  }
}

void check_gpu_memory(const GpuMemoryNeed& need, std::int64_t free) {
  if (need.arena_bytes <= free && need.weight_bytes <= free - need.arena_bytes) return;
  refuse(cat("the engine needs ", need.weight_bytes, " bytes for its weights and ", need.arena_bytes, " for steps of ",
             need.max_num_tokens, " tokens, the device has ", free,
             " free; free some memory there, or build the engine with --fp8, for more ranks (--tp) or with a smaller "
             "--max-num-tokens"));
}

}  // namespace aotllm
