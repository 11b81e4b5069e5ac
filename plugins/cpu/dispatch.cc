#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "aotllm/errors.h"
#include "kernels.h"

namespace aotllm::cpu {

// AOTLLM_CPU_ISAS of the build decides which tables there are.
#ifdef AOTLLM_HAS_avx2
namespace avx2 {
extern const Kernels kTable;
}
#define AOTLLM_TABLE_avx2 &avx2::kTable
#else
#define AOTLLM_TABLE_avx2 nullptr
#endif
#ifdef AOTLLM_HAS_avx512
namespace avx512 {
extern const Kernels kTable;
}
#define AOTLLM_TABLE_avx512 &avx512::kTable
#else
#define AOTLLM_TABLE_avx512 nullptr
#endif
#ifdef AOTLLM_HAS_avx512_vnni
namespace avx512_vnni {
extern const Kernels kTable;
}
#define AOTLLM_TABLE_avx512_vnni &avx512_vnni::kTable
#else
#define AOTLLM_TABLE_avx512_vnni nullptr
#endif
#ifdef AOTLLM_HAS_avx512_bf16
namespace avx512_bf16 {
extern const Kernels kTable;
}
#define AOTLLM_TABLE_avx512_bf16 &avx512_bf16::kTable
#else
#define AOTLLM_TABLE_avx512_bf16 nullptr
#endif
#ifdef AOTLLM_HAS_amx
namespace amx {
extern const Kernels kTable;
}
#define AOTLLM_TABLE_amx &amx::kTable
#else
#define AOTLLM_TABLE_amx nullptr
#endif

namespace {

/// What the kernels ask of CPU and operating system.
struct CpuFeatures {
  bool avx2 = false;         ///< AVX2, FMA, F16C, BMI2; the OS saves ymm
  bool avx512 = false;       ///< F, BW, VL, DQ; the OS saves zmm and masks
  bool avx512_vnni = false;  ///< AVX512_VNNI
  bool avx512_bf16 = false;  ///< AVX512_VNNI and AVX512_BF16
  bool amx = false;          ///< and AMX_TILE, AMX_BF16; the OS saves tiles and lets this process use them
};

/// Extended control register 0: which register states the operating system saves.
std::uint64_t read_xcr0() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<std::uint64_t>(high) << 32 | low;
}

/// Asks the operating system for the memory that saved tiles take, without which their first use is a fault. Holds for
/// the whole process.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, Linux 5.16
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Bits: Intel SDM volume 2, CPUID leaves 1 and 7; volume 1, 13.3 for XCR0.
CpuFeatures detect() {
  CpuFeatures features;
  std::uint32_t eax = 0;
  std::uint32_t ebx = 0;
  std::uint32_t ecx = 0;
  std::uint32_t edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return features;
  const auto bit = [](std::uint32_t word, int i) { return (word >> i & 1) != 0; };
  const bool fma = bit(ecx, 12);
  const bool osxsave = bit(ecx, 27);
  const bool avx = bit(ecx, 28);
  const bool f16c = bit(ecx, 29);
  if (!osxsave || !avx) return features;

  constexpr std::uint64_t kYmmState = 0x06;  // xmm, upper halves of ymm
  constexpr std::uint64_t kZmmState = 0xE6;  // and masks, upper halves of zmm0-15, zmm16-31
  const std::uint64_t xcr0 = read_xcr0();
  if ((xcr0 & kYmmState) != kYmmState || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return features;

  features.avx2 = fma && f16c && bit(ebx, 5) && bit(ebx, 8);
  features.avx512 =
      features.avx2 && (xcr0 & kZmmState) == kZmmState && bit(ebx, 16) && bit(ebx, 17) && bit(ebx, 30) && bit(ebx, 31);
  features.avx512_vnni = features.avx512 && bit(ecx, 11);
  constexpr std::uint64_t kTileState = 0x60000;  // configuration and data of tiles
  const bool tiles = bit(edx, 22) && bit(edx, 24) && (xcr0 & kTileState) == kTileState;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0) return features;
  features.avx512_bf16 = features.avx512_vnni && bit(eax, 5);
  features.amx = features.avx512_bf16 && tiles && may_use_tiles();
  return features;
}

struct Isa {
  std::string_view name;
  const Kernels* table;  ///< nullptr where this build lacks it
  bool CpuFeatures::* supported;
  const char* needs;
};

/// From best to least.
const std::array<Isa, 5>& isas() {
  static const std::array<Isa, 5> all = {{
      {"amx", AOTLLM_TABLE_amx, &CpuFeatures::amx, "AVX-512 F, BW, VL, DQ, VNNI and BF16, AMX TILE and BF16"},
      {"avx512_bf16", AOTLLM_TABLE_avx512_bf16, &CpuFeatures::avx512_bf16, "AVX-512 F, BW, VL, DQ, VNNI and BF16"},
      {"avx512_vnni", AOTLLM_TABLE_avx512_vnni, &CpuFeatures::avx512_vnni, "AVX-512 F, BW, VL, DQ and VNNI"},
      {"avx512", AOTLLM_TABLE_avx512, &CpuFeatures::avx512, "AVX-512 F, BW, VL and DQ"},
      {"avx2", AOTLLM_TABLE_avx2, &CpuFeatures::avx2, "AVX2, FMA, F16C and BMI2"},
  }};
  return all;
}

const CpuFeatures& features() {
  static const CpuFeatures detected = detect();
  return detected;
}

bool is_usable(const Isa& isa) {
  return isa.table != nullptr && features().*isa.supported;
}

const Kernels& forced(std::string_view name) {
  for (const Isa& isa : isas()) {
    if (isa.name != name) continue;
    if (is_usable(isa)) return *isa.table;
    if (isa.table == nullptr) {
      throw Error(
          ErrorKind::kEngineIncompatible,
          "AOTLLM_FORCE_ISA=" + std::string(name) + " needs a build with it in AOTLLM_CPU_ISAS; this one has it not.");
    }
    throw Error(ErrorKind::kEngineIncompatible,
                "AOTLLM_FORCE_ISA=" + std::string(name) + " needs a CPU and an operating system with " + isa.needs +
                    ", which this machine lacks; unset AOTLLM_FORCE_ISA to use the best instruction set it has.");
  }
  throw Error(ErrorKind::kEngineIncompatible, "AOTLLM_FORCE_ISA is '" + std::string(name) +
                                                  "', which is not an instruction set of this build; set it to avx2, "
                                                  "avx512, avx512_vnni, avx512_bf16 or amx, or unset it.");
}

const Kernels& choose() {
  const char* name = std::getenv("AOTLLM_FORCE_ISA");
  if (name != nullptr && *name != '\0') return forced(name);
  for (const Isa& isa : isas()) {
    if (is_usable(isa)) return *isa.table;
  }
  throw Error(
      ErrorKind::kEngineIncompatible,
      "The cpu target and FP8 builds need a CPU and an operating system with AVX2, FMA, F16C and BMI2, which this "
      "machine lacks; run them on an x86-64 machine of 2013 or later, with AVX enabled in its hypervisor.");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();  // a throw leaves it unset: the next call throws again
  return chosen;
}

const Kernels* kernels_for(const char* isa) noexcept {
  for (const Isa& candidate : isas()) {
    if (candidate.name == isa) return is_usable(candidate) ? candidate.table : nullptr;
  }
  return nullptr;
}

const char* matmul_isa(Format format, const Kernels& kernels) noexcept {
  const std::string_view isa = kernels.isa;
  if (isa == "avx2" || isa == "avx512") return kernels.isa;
  if (!is_float_format(format)) return "avx512_vnni";
  return format == Format::kBF16 && isa != "avx512_vnni" ? kernels.isa : "avx512";
}

bool same_products(Format format, const Kernels& a, const Kernels& b) noexcept {
  constexpr std::string_view kOther = "amx";
  return (matmul_isa(format, a) == kOther) == (matmul_isa(format, b) == kOther);
}

}  // namespace aotllm::cpu
