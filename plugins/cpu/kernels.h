#pragma once

#include <cstddef>
#include <cstdint>

namespace aotllm::cpu {

/// Formats of packed segments; `docs/engine_format.md` gives the layouts, `format_name` the names used there.
enum class Format : std::uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIQ4_NL,
  kMXFP4,
  kQ8_F32,
};

/// Rows of a panel, the lanes of a kernel.
inline constexpr int kPanelRows = 16;
/// Columns of a weight block: `k` of a block format is a multiple of it.
inline constexpr int kWeightBlock = 32;
/// Values that share one activation scale. Half a weight block: it costs a multiply-add more per block and takes a
/// third off the divergence from exact arithmetic (docs/benchmarks.md).
inline constexpr int kActivationBlock = 16;

constexpr bool is_float_format(Format f) {
  return f <= Format::kBF16;
}

/// "q4_1" → kQ4_1. Returns false for an unknown name.
bool parse_format(const char* name, Format& format) noexcept;
const char* format_name(Format format) noexcept;

/// Bytes of one panel of `k` columns (k a multiple of 32 for block formats); a multiple of 64.
std::size_t panel_bytes(Format format, int k) noexcept;

/// Whole rows of a packed matrix in one format.
struct Segment {
  Format format = Format::kF32;
  int n = 0;  ///< rows; the last panel is padded with zero rows
  int k = 0;
  const std::uint8_t* panels = nullptr;  ///< 64-byte aligned
};

/// The inputs of a matmul: float rows for float formats, quantized rows for block formats.
struct Activations {
  const float* x = nullptr;  ///< [rows, k], row stride `x_stride` floats
  std::ptrdiff_t x_stride = 0;
  const std::int8_t* q = nullptr;      ///< [rows, k], in [-127, 127]
  const float* scales = nullptr;       ///< [rows, k / 16]
  const std::int32_t* sums = nullptr;  ///< [rows, k / 16]: sum of q
};

/// KV element types of the CPU target. kI8: signed codes, a float32 scale for each token, once for K and once for V.
enum class KvType : std::uint8_t { kF32, kF16, kI8 };

/// The widest head that the kernels take.
inline constexpr int kMaxHeadDim = 512;

/// Bytes of K (or of V) of one KV head in one block; a multiple of 64. head_dim is a multiple of 8, tokens_per_block of
/// 16.
constexpr std::size_t kv_head_bytes(KvType type, int head_dim, int tokens_per_block) noexcept {
  const auto tokens = static_cast<std::size_t>(tokens_per_block);
  const std::size_t elements = static_cast<std::size_t>(head_dim) * tokens;
  if (type == KvType::kI8) return elements + tokens * sizeof(float);
  return elements * (type == KvType::kF32 ? 4 : 2);
}

/// One query token, one group of query heads that share a KV head.
///
/// KV block layout, per layer and KV head, contiguous and 64-byte aligned, tokens_per_block a multiple of 16:
///   kF32, kF16   K `[head_dim][tokens_per_block]` (lanes are tokens), V `[tokens_per_block][head_dim]`
///   kI8          codes, K `[head_dim / 2][tokens_per_block][2]`, V `[tokens_per_block / 2][head_dim][2]`: pairs along
///                the axis that is summed; behind them the scales `[tokens_per_block]`, value = scale · code
struct AttentionArgs {
  const float* q = nullptr;  ///< [group, head_dim]
  float* out = nullptr;      ///< [group, head_dim]
  int group = 1;             ///< query heads per KV head
  int head_dim = 0;          ///< a multiple of 8, at most kMaxHeadDim
  KvType kv_type = KvType::kF32;
  const std::uint8_t* k_base = nullptr;  ///< K of this layer and KV head in block 0
  const std::uint8_t* v_base = nullptr;  ///< V likewise
  std::ptrdiff_t block_stride = 0;       ///< bytes from a block to the next
  const std::int32_t* block_table = nullptr;
  int tokens_per_block = 16;
  int position = 0;  ///< of the query; it sees [max(0, position - window + 1), position]
  int window = 0;    ///< 0 = all
  float scale = 1.0f;
  float softcap = 0.0f;  ///< 0 = off
};

enum class Activation : std::uint8_t { kSilu, kGeluTanh };

/// The kernels of one ISA. Each computes every output by a reduction order that depends on `k` or the position only, so
/// that results are the same bit for bit whatever `rows`, the panel range or the thread.
struct Kernels {
  const char* isa;

  /// y[n] = x · w / sqrt(mean(x²) + eps). In place (y == x) allowed.
  void (*rms_norm)(const float* x, const float* w, float eps, int n, float* y);

  /// Quantizes k values (a multiple of 32) to `q`, `scales` [k / 16], `sums` [k / 16].
  void (*quantize)(const float* x, int k, std::int8_t* q, float* scales, std::int32_t* sums);

  /// Panels [panel_begin, panel_end) of `y = W · x` for `rows` rows: column 16·p + r of panel p goes to
  /// y[row · y_stride + 16 · (p - panel_begin) + r]; columns ≥ n are not written.
  void (*matmul)(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                 std::ptrdiff_t y_stride);

  /// out[k] = scale · W[row, :], dequantized.
  void (*dequantize_row)(const Segment& w, int row, float scale, float* out);

  /// Rotate-half RoPE in place on x[2 · half]: cos, sin [half].
  void (*rope)(float* x, const float* cos, const float* sin, int half);

  /// Stores one token's K and V of one KV head at `slot` of a block (layouts as in AttentionArgs).
  void (*store_kv)(const float* k, const float* v, int head_dim, KvType type, std::uint8_t* k_block,
                   std::uint8_t* v_block, int slot, int tokens_per_block);

  void (*attention)(const AttentionArgs& args);

  /// out[i] = act(gate[i]) · up[i]
  void (*act_mul)(Activation act, const float* gate, const float* up, int n, float* out);

  /// out[i] = a[i] + b[i]; in place allowed
  void (*add)(const float* a, const float* b, int n, float* out);

  /// out[i] = a[i] + scale · b[i], rounded once; in place allowed
  void (*add_scaled)(const float* a, float scale, const float* b, int n, float* out);

  /// x[i] = cap · tanh(x[i] / cap)
  void (*softcap)(float* x, int n, float cap);

  /// out[i] = Σ_c a[i · k + c] · x[c] for i in [0, n): the rows of a small matrix that is not packed.
  void (*dot_rows)(const float* a, const float* x, int n, int k, float* out);
};

/// The kernels that this process uses: the best ISA of the CPU, or AOTLLM_FORCE_ISA (`avx2`, `avx512`, `avx512_vnni`)
/// where that is lower. Chosen once. Throws aotllm::Error(kEngineIncompatible) on a CPU without AVX2, FMA, F16C and
/// BMI2, or for a forced ISA that is unknown or that the CPU lacks.
const Kernels& kernels();

/// The kernels of a named ISA, or nullptr where this CPU cannot run it (tests).
const Kernels* kernels_for(const char* isa) noexcept;

}  // namespace aotllm::cpu
