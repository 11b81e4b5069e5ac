#include "runner/gpu_requirements.h"

#include <gtest/gtest.h>

#include <string>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

/// An H200 with the driver and the runtime of CUDA 13.0.
GpuMachine h200() {
  return {.runtime_version = 13000, .driver_version = 13000, .device_count = 1, .name = "NVIDIA H200", .sm = 90};
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

TEST(GpuRequirements, NamesTheDevicesThatThereAre) {
  EXPECT_EQ(verdict(h200(), 1), "invalid: device: expected 0 to 0, got 1");
  EXPECT_EQ(verdict(h200(), -1), "invalid: device: expected 0 to 0, got -1");
}

TEST(GpuRequirements, NamesBothGpusWhereTheDeviceIsAnother) {
  GpuMachine machine = h200();
  machine.name = "NVIDIA L40S";
  machine.sm = 89;
  EXPECT_EQ(verdict(machine),
            "incompatible: the engine is for SM90, device 0 has SM89 (NVIDIA L40S); run it on an SM90 GPU");
}

TEST(GpuRequirements, SaysWhichKernelsThisBuildHas) {
  EXPECT_EQ(
      verdict(h200(), 0, 80),
      "incompatible: the engine is for SM80, this build of aotllm has kernels for SM90 only; build the engine with "
      "--sm 90 and run it on such a GPU");
}

}  // namespace
}  // namespace aotllm
