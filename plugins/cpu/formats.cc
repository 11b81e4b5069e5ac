#include <array>
#include <cstring>
#include <utility>

#include "kernels.h"

namespace aotllm::cpu {

namespace {

/// One row of the format table in docs/engine_format.md. Sizes are per panel of 16 rows.
struct FormatInfo {
  Format format;
  const char* name;
  std::size_t code_bytes;   ///< of a block of 32 columns
  std::size_t scale_bytes;  ///< of `span` columns
  std::size_t span = 32;    ///< columns whose scales lie together: of a block, or of 256 in two levels
};

constexpr std::size_t kLine = 64;

constexpr std::array<FormatInfo, 20> kFormats = {{
    {Format::kF32, "f32", 0, 0},
    {Format::kF16, "f16", 0, 0},
    {Format::kBF16, "bf16", 0, 0},
    {Format::kQ4_0, "q4_0", 4 * kLine, 32},
    {Format::kQ4_1, "q4_1", 4 * kLine, 64},
    {Format::kQ5_0, "q5_0", 5 * kLine, 32},
    {Format::kQ5_1, "q5_1", 5 * kLine, 64},
    {Format::kQ8_0, "q8_0", 8 * kLine, 32},
    {Format::kQ2_K, "q2_k", 4 * kLine, 64 + 8 * 64, 256},
    {Format::kQ3_K, "q3_k", 4 * kLine, 32 + 8 * 32, 256},
    {Format::kQ4_K, "q4_k", 4 * kLine, 64 + 8 * 32, 256},
    {Format::kQ5_K, "q5_k", 5 * kLine, 64 + 8 * 32, 256},
    {Format::kQ6_K, "q6_k", 6 * kLine, 32 + 8 * 32, 256},
    {Format::kIQ4_NL, "iq4_nl", 4 * kLine, 64},
    {Format::kMXFP4, "mxfp4", 4 * kLine, 64},
    {Format::kQ8_F32, "q8_f32", 8 * kLine, 128},
    {Format::kQ4_0_G64, "q4_0_g64", 4 * kLine, 32, 64},
    {Format::kQ4_0_G128, "q4_0_g128", 4 * kLine, 32, 128},
    {Format::kQ4_1_G64, "q4_1_g64", 4 * kLine, 64, 64},
    {Format::kQ4_1_G128, "q4_1_g128", 4 * kLine, 64, 128},
}};

constexpr bool table_is_in_enum_order() {
  for (std::size_t i = 0; i < kFormats.size(); ++i) {
    if (static_cast<std::size_t>(kFormats[i].format) != i) return false;
  }
  return true;
}
static_assert(table_is_in_enum_order());

constexpr std::size_t ceil_div(std::size_t a, std::size_t b) {
  return (a + b - 1) / b;
}

}  // namespace

bool parse_format(const char* name, Format& format) noexcept {
  for (const FormatInfo& info : kFormats) {
    if (std::strcmp(name, info.name) == 0) {
      format = info.format;
      return true;
    }
  }
  return false;
}

const char* format_name(Format format) noexcept {
  return kFormats[static_cast<std::size_t>(format)].name;
}

std::size_t panel_bytes(Format format, int k) noexcept {
  const auto columns = static_cast<std::size_t>(k);
  if (format == Format::kF32) return columns * kLine;
  if (format == Format::kF16 || format == Format::kBF16) return ceil_div(columns, 2) * kLine;
  const FormatInfo& info = kFormats[static_cast<std::size_t>(format)];
  const std::size_t bytes = columns / 32 * info.code_bytes + ceil_div(columns, info.span) * info.scale_bytes;
  return ceil_div(bytes, kLine) * kLine;
}

}  // namespace aotllm::cpu
