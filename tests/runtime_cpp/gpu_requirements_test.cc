#include "runner/gpu_requirements.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

/// An H200 with the driver and the runtime of CUDA 13.0.
GpuMachine h200() {
  return {.runtime_version = 13000,
          .driver_version = 13000,
          .device_count = 1,
          .device_error = "",
          .name = "NVIDIA H200",
          .sm = 90,
          .kernel_sm = 90};
}

/// Kind and text of the refusal; "accepted" where there is none.
std::string verdict(const GpuMachine& machine, int ordinal = 0, int sm = 90) {
  try {
    check_gpu_requirements(machine, ordinal, sm);
  } catch (const Error& error) {
    return (error.kind() == ErrorKind::kEngineIncompatible ? "incompatible: " : "invalid: ") +
           std::string(error.what());
  }
  return "accepted";
}

TEST(GpuRequirements, AcceptsTheMachineThatAnEngineIsFor) {
  EXPECT_EQ(verdict(h200()), "accepted");
  GpuMachine two = h200();
  two.device_count = 2;
  EXPECT_EQ(verdict(two, 1), "accepted");
}

TEST(GpuRequirements, TakesDriversOfTheSameMajorVersionAndNewerOnes) {
  GpuMachine machine = h200();
  machine.runtime_version = 13020;
  EXPECT_EQ(verdict(machine), "accepted") << "13.0 runs what 13.2 compiled";
  machine.driver_version = 14010;
  EXPECT_EQ(verdict(machine), "accepted");
  machine.driver_version = 12080;
  EXPECT_EQ(
      verdict(machine),
      "incompatible: the engine needs a driver for CUDA 13, the one here is for CUDA 12.8; install a newer NVIDIA "
      "driver");
}

TEST(GpuRequirements, SaysThatThereIsNoDriver) {
  GpuMachine machine;
  machine.runtime_version = 13000;
  EXPECT_EQ(
      verdict(machine),
      "incompatible: the engine needs an NVIDIA GPU, and no NVIDIA driver is installed here; build it with --target "
      "cpu or run it on a machine with a GPU");
}

TEST(GpuRequirements, SaysThatTheDriverFindsNoDevice) {
  GpuMachine machine = h200();
  machine.device_count = 0;
  EXPECT_EQ(verdict(machine),
            "incompatible: the engine needs an NVIDIA GPU, and the driver finds none; build it with --target cpu, or "
            "check CUDA_VISIBLE_DEVICES");
}

TEST(GpuRequirements, SaysWhyTheDriverOpensNoDevice) {
  GpuMachine machine = h200();
  machine.device_count = 0;
  machine.device_error = "system not yet initialized";
  EXPECT_EQ(verdict(machine),
            "incompatible: the engine needs an NVIDIA GPU, and the driver opens none: system not yet initialized; see "
            "what nvidia-smi says, or build the engine with --target cpu");
  machine.driver_version = 12080;  // says more
  EXPECT_EQ(verdict(machine),
            "incompatible: the engine needs a driver for CUDA 13, the one here is for CUDA 12.8; install a newer "
            "NVIDIA driver");
}

TEST(GpuRequirements, NamesTheDevicesThatThereAre) {
  EXPECT_EQ(verdict(h200(), 1), "invalid: device: expected 0 to 0, got 1");
  EXPECT_EQ(verdict(h200(), -1), "invalid: device: expected 0 to 0, got -1");
}

TEST(GpuRequirements, NamesBothGpusWhereTheDeviceIsAnother) {
  GpuMachine machine = h200();
  machine.name = "NVIDIA L40S";
  machine.sm = 89;
  EXPECT_EQ(verdict(machine),
            "incompatible: the engine is for SM90, device 0 has SM89 (NVIDIA L40S); run it on an SM90 GPU, or build it "
            "with --sm 89");
  machine.name = "NVIDIA A100";
  machine.sm = 80;
  EXPECT_EQ(verdict(machine, 0, 89),
            "incompatible: the engine is for SM89, device 0 has SM80 (NVIDIA A100); run it on an SM89 GPU or a later "
            "one, or build it with --sm 80");
}

TEST(GpuRequirements, TakesLaterDevicesForWhatIsNotForSm90) {
  GpuMachine machine = h200();
  EXPECT_EQ(verdict(machine, 0, 80), "accepted");
  EXPECT_EQ(verdict(machine, 0, 89), "accepted");
  machine.sm = 120;
  machine.kernel_sm = 80;  // PTX
  EXPECT_EQ(verdict(machine, 0, 80), "accepted");
}

TEST(GpuRequirements, SaysWhichKernelsThisBuildHas) {
  GpuMachine machine = h200();
  machine.sm = machine.kernel_sm = 80;
  machine.name = "NVIDIA A100";
  EXPECT_EQ(verdict(machine, 0, 80), "accepted");
  machine.kernel_sm = 0;
  EXPECT_EQ(verdict(machine, 0, 80),
            "incompatible: the engine is for SM80, and this build of aotllm has no kernels for device 0 (NVIDIA A100); "
            "install one built with SM80 among its AOTLLM_CUDA_ARCHS");
  machine.sm = 89;
  machine.kernel_sm = 80;
  EXPECT_EQ(verdict(machine, 0, 89),
            "incompatible: the engine is for SM89, and this build of aotllm has kernels of SM80 only for device 0 "
            "(NVIDIA A100); install one built with SM89 among its AOTLLM_CUDA_ARCHS");
  EXPECT_EQ(verdict(h200(), 0, 75),
            "incompatible: the engine is for SM75, aotllm has kernels for SM80, SM89 and SM90; build the engine with "
            "--sm 80, 89 or 90");
}

TEST(GpuMemory, WeightsAndBuffersMustFitTogether) {
  EXPECT_NO_THROW(check_gpu_memory({600, 400, 8192}, 1000));
  EXPECT_NO_THROW(check_gpu_memory({}, 0));
  for (const GpuMemoryNeed& need : {GpuMemoryNeed{601, 400, 8192}, GpuMemoryNeed{601, 1001, 8192},
                                    GpuMemoryNeed{INT64_MAX, 1, 8192}, GpuMemoryNeed{1, INT64_MAX, 8192}}) {
    EXPECT_THROW(check_gpu_memory(need, 1000), Error) << need.weight_bytes << ' ' << need.arena_bytes;
  }
}

TEST(GpuMemory, SaysWhatIsNeededAndThereAndToDo) {
  try {
    check_gpu_memory({16'000'000'000, 1'000'000, 8192}, 12'000'000'000);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kEngineIncompatible);
    EXPECT_STREQ(error.what(),
                 "the engine needs 16000000000 bytes for its weights and 1000000 for steps of 8192 tokens, the device "
                 "has 12000000000 free; free some memory there, or build the engine with --fp8, for more ranks (--tp) "
                 "or with a smaller --max-num-tokens");
  }
}

}  // namespace
}  // namespace aotllm
