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
  kQ4_0_G64,
  kQ4_0_G128,
  kQ4_1_G64,
  kQ4_1_G128,
};

/// Rows of a panel, the lanes of a kernel.
inline constexpr int kPanelRows = 16;
/// Columns of a weight block: `k` of a block format is a multiple of it.
inline constexpr int kWeightBlock = 32;
/// Values that share one activation factor. Half a weight block: it takes a third off the divergence from exact
/// arithmetic (docs/benchmarks.md).
inline constexpr int kActivationGroup = 16;
/// The factor of a row's largest group.
inline constexpr int kLargestFactor = 1 << 14;

/// One row's activations in a weight block, quantized: x ≈ s · factors[i / 16] · q[i] with s the row's scale. All that
/// a kernel reads of them is one cache line.
struct alignas(64) ActivationBlock {
  std::int8_t q[kWeightBlock];     ///< in [-127, 127]
  float scales[2];                 ///< factors as floats, of q[0, 16) and q[16, 32)
  std::int16_t factors[2];         ///< whole numbers in [0, kLargestFactor]
  float sum;                       ///< factors[0] · Σ q[0, 16) + factors[1] · Σ q[16, 32): what mins multiply
  std::int32_t minus_8_sums[2];    ///< -8 · Σ q of each half: cancels a zero point of 8 and, shifted, of any 2^n
  std::int32_t minus_128_sums[2];  ///< -128 · Σ q of each half
};
static_assert(sizeof(ActivationBlock) == 64);

/// The scale of a row of `k` activations: behind its blocks, in a line of its own.
[[gnu::always_inline]] inline float& row_scale(ActivationBlock* row, int k) noexcept {
  return row[k / kWeightBlock].scales[0];
}

/// Lines from a row of `k` activations to the next: an odd number, so that the rows of a tile do not share cache sets.
constexpr std::ptrdiff_t activation_stride(int k) noexcept {
  return (k / kWeightBlock + 1) | 1;
}

constexpr bool is_float_format(Format f) {
  return f <= Format::kBF16;
}

/// "q4_1" → kQ4_1. Returns false for an unknown name.
bool parse_format(const char* name, Format& format) noexcept;
const char* format_name(Format format) noexcept;

/// Bytes of one panel of `k` columns (k a multiple of 32 for block formats); a multiple of 64.
std::size_t panel_bytes(Format format, int k) noexcept;
/// Panels of `rows` rows of weights.
constexpr int panels_of(int rows) noexcept {
  return (rows + kPanelRows - 1) / kPanelRows;
}
/// Bytes of the panels of an n × k matrix.
inline std::size_t segment_bytes(Format format, int n, int k) noexcept {
  return static_cast<std::size_t>(panels_of(n)) * panel_bytes(format, k);
}

/// Whole rows of a packed matrix in one format.
struct Segment {
  Format format = Format::kF32;
  int n = 0;  ///< rows; the last panel is padded with zero rows
  int k = 0;
  const std::uint8_t* panels = nullptr;  ///< 64-byte aligned
};

/// Values of bfloat16 in a line of 64 bytes.
inline constexpr int kBf16Line = 32;

/// From a row of `k` activations in bfloat16 to the next: whole lines, an odd number of them, so that rows do not fall
/// into the same sets of a cache.
constexpr std::ptrdiff_t bf16_stride(int k) {
  return static_cast<std::ptrdiff_t>((k + kBf16Line - 1) / kBf16Line | 1) * kBf16Line;
}

/// The inputs of a matmul: float rows for f32 and f16, bfloat16 rows for bf16, quantized rows for block formats.
struct Activations {
  const float* x = nullptr;  ///< [rows, k], row stride `x_stride` floats
  std::ptrdiff_t x_stride = 0;
  const ActivationBlock* blocks = nullptr;  ///< [rows, k / 32 and the row's scale], row stride `activation_stride(k)`
  const std::uint16_t* bf16 =
      nullptr;  ///< [rows, k], row stride `bf16_stride(k)`; zeros up to the end of k's last line
};

/// KV element types of the CPU target. kBF16: values rounded to nearest even. kI16, kI8: signed codes, a float32 scale
/// for each token and KV head, once for K and once for V.
enum class KvType : std::uint8_t { kF32, kBF16, kI16, kI8 };

/// The widest head that the kernels take.
inline constexpr int kMaxHeadDim = 512;

/// Bytes of K (or of V) of one KV head in one block; a multiple of 64. head_dim is a multiple of 8, tokens_per_block of
/// 16.
constexpr std::size_t kv_head_bytes(KvType type, int head_dim, int tokens_per_block) noexcept {
  const auto tokens = static_cast<std::size_t>(tokens_per_block);
  const std::size_t elements = static_cast<std::size_t>(head_dim) * tokens;
  switch (type) {
    case KvType::kF32:
      return elements * sizeof(float);
    case KvType::kBF16:
      return elements * 2;
    case KvType::kI16:
      return elements * 2 + tokens * sizeof(float);
    case KvType::kI8:
      return elements + tokens * sizeof(float);
  }
  return 0;
}

// The functions from here to `Kernels` are always inlined: kernels call them, and no code that was compiled for one ISA
// may be run elsewhere.

/// Attention folds a row's context together range by range. This is the length of the range that holds `position`,
/// which begins at a multiple of it: 256, and from 4,096 on an eighth to a sixteenth of the position (of the window,
/// where that is less), so that the longest context has some dozens of ranges.
[[gnu::always_inline]] constexpr int kv_range_length(int position, int window) noexcept {
  const int reach = window > 0 && window < position ? window : position;
  int length = 256;
  while (length * 16 <= reach) length *= 2;
  return length;
}

/// The range after the one that begins at `begin`.
[[gnu::always_inline]] constexpr int next_kv_range(int begin, int window) noexcept {
  return begin + kv_range_length(begin, window);
}

/// Query vectors (rows · heads) of one call of `attention`: as many as keep their sums in L1. A multiple of 8.
[[gnu::always_inline]] constexpr int max_attention_vectors(int head_dim) noexcept {
  const int vectors = 4096 / ((head_dim + 15) / 16 * 16) / 8 * 8;
  return vectors > 64 ? 64 : vectors;
}

/// Consecutive tokens of one sequence, with those of their query heads that share a KV head.
///
/// KV block layout, per layer and KV head, contiguous and 64-byte aligned, tokens_per_block a multiple of 16:
///   kF32       K `[head_dim][tokens_per_block]` (lanes are tokens), V `[tokens_per_block][head_dim]`
///   kBF16      K `[head_dim / 2][tokens_per_block][2]`, V `[tokens_per_block / 2][head_dim][2]`: pairs along the axis
///              that is summed
///   kI16, kI8  codes likewise; behind them the scales `[tokens_per_block]`, value = scale · code
struct AttentionArgs {
  const float* q = nullptr;  ///< [rows, heads, head_dim], rows `row_stride` floats apart
  float* out = nullptr;      ///< likewise
  std::ptrdiff_t row_stride = 0;
  int rows = 1;      ///< rows · heads at most `max_attention_vectors(head_dim)`
  int heads = 1;     ///< query heads
  int head_dim = 0;  ///< a multiple of 8, at most kMaxHeadDim
  KvType kv_type = KvType::kF32;
  const std::uint8_t* k_base = nullptr;  ///< K of this layer and KV head in block 0
  const std::uint8_t* v_base = nullptr;  ///< V likewise
  std::ptrdiff_t block_stride = 0;       ///< bytes from a block to the next
  const std::int32_t* block_table = nullptr;
  int tokens_per_block = 16;
  int position = 0;  ///< of the first row; a row sees [first_seen(position), position]
  int window = 0;    ///< 0 = all
  float scale = 1.0f;
  float softcap = 0.0f;  ///< 0 = off
  /// The call that this thread makes after this one, of the same layer: at the end of this one the kernel begins to
  /// fetch what that one reads. Changes no result.
  const AttentionArgs* next = nullptr;

  [[gnu::always_inline]] int last_position() const noexcept { return position + rows - 1; }
  [[gnu::always_inline]] int first_seen(int row_position) const noexcept {
    return window > 0 && row_position >= window ? row_position - window + 1 : 0;
  }
  /// Begin of the range that holds `at`.
  [[gnu::always_inline]] int range_of(int at) const noexcept { return at - at % kv_range_length(at, window); }
};

/// Floats of what one query vector makes of one range.
[[gnu::always_inline]] constexpr std::ptrdiff_t attention_partial_floats(int head_dim) noexcept {
  return (head_dim + 15) / 16 * 16 + 16;
}

enum class Activation : std::uint8_t { kSilu, kGeluTanh };

/// Of rows as a checkpoint stores them.
enum class FloatType : std::uint8_t { kF32, kF16, kBF16 };

/// The kernels of one ISA. Each computes every output by a reduction order that depends on `k` or the position only, so
/// that results are the same bit for bit whatever `rows`, the panel range or the thread. The order is also the same on
/// every ISA, but for bf16 weights on `amx`.
struct Kernels {
  const char* isa;

  /// y[n] = x · w / sqrt(mean(x²) + eps). In place (y == x) allowed.
  void (*rms_norm)(const float* x, const float* w, float eps, int n, float* y);

  /// Quantizes k values (a multiple of 32) to k / 32 blocks and the row's scale.
  void (*quantize)(const float* x, int k, ActivationBlock* blocks);

  /// `quantize` of what `rms_norm` gives, bit for bit, in one pass over x; n a multiple of 32.
  void (*rms_norm_quantize)(const float* x, const float* w, float eps, int n, ActivationBlock* blocks);

  /// Rounds k values to bfloat16, to nearest even, a NaN to a NaN; `out` gets zeros up to a multiple of kBf16Line.
  void (*to_bf16)(const float* x, int k, std::uint16_t* out);

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

  /// The result of each row depends on its position and what it sees only, not on the rows and heads beside it.
  void (*attention)(const AttentionArgs& args);

  /// A part of `attention`, which `merge_attention` completes: the range that begins at `range`, which some row sees.
  /// `partials`: [rows · heads, attention_partial_floats(head_dim)]; vectors that see nothing of it are left out.
  void (*attention_range)(const AttentionArgs& args, int range, float* partials);

  /// Completes `attention` from the partials of all ranges from range_of(first_seen(position)) on, in order,
  /// [ranges, rows · heads, attention_partial_floats(head_dim)].
  void (*merge_attention)(const AttentionArgs& args, const float* partials);

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

  /// Widens k values at any address.
  void (*widen)(FloatType type, const void* values, int k, float* out);

  /// The scale of a row of weights in E4M3: of max|w| / 448 · factors[i], factors in [1, 2), the one whose codes have
  /// the least squared error, the first of equals. 1 for a row of zeros; not finite where a value is not.
  float (*e4m3_scale)(const float* w, int k, const float* factors, int num_factors);

  /// The codes of w[i] / scale, rounded to nearest even, at most ±448; w is finite.
  void (*e4m3_codes)(const float* w, int k, float scale, std::uint8_t* codes);
};

/// The kernels that this process uses: the best ISA of the CPU, or AOTLLM_FORCE_ISA (`avx2`, `avx512`, `avx512_vnni`,
/// `avx512_bf16`, `amx`) where that is lower. Chosen once. Throws aotllm::Error(kEngineIncompatible) on a CPU without
/// AVX2, FMA, F16C and BMI2, or for a forced ISA that is unknown or that the CPU lacks.
const Kernels& kernels();

/// ISAs of target cpu, best first; a build or a CPU may lack some.
inline constexpr const char* kIsaNames[] = {"amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2"};

/// The kernels of a named ISA, or nullptr where this CPU or this build lacks it.
const Kernels* kernels_for(const char* isa) noexcept;

/// The least ISA whose `matmul` of weights in `format` is that of `kernels`.
const char* matmul_isa(Format format, const Kernels& kernels) noexcept;
/// `matmul` of weights in `format` gives the same bits by both.
bool same_products(Format format, const Kernels& a, const Kernels& b) noexcept;

}  // namespace aotllm::cpu
