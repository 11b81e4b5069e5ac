#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "engine/safetensors.h"
#include "kernels.h"

namespace aotllm {

/// The version of `docs/engine_format.md` that this runtime reads.
inline constexpr int kPlanVersion = 1;

/// Where an engine runs.
enum class Target : std::uint8_t { kCpu, kCuda };

/// An intermediate of a step in the arena: float32 [max_num_tokens, width]; target cuda: bf16, rows rounded up to
/// kDeviceRowStep.
struct Buffer {
  std::string name;
  int width = 0;
  std::int64_t offset = 0;  ///< bytes, a multiple of 64; target cuda: of 256
};

/// Buffers of target cuda have a multiple of this many rows: what a tile of a GEMM may read.
inline constexpr int kDeviceRowStep = 128;

/// A segment and its place in the linear.
struct LinearSegment {
  cpu::Segment weights;
  int row_begin = 0;
  int panel_begin = 0;  ///< panels are numbered through all segments
};

/// How target cuda stores a matrix (`docs/engine_format.md`).
enum class MatrixFormat : std::uint8_t { kBf16, kFp8, kFp8Block, kInt8, kInt4 };

/// A matrix of target cuda: rows contiguous along k, integers in blocks of 64 rows × 128 columns.
struct Matrix {
  MatrixFormat format = MatrixFormat::kBf16;
  std::span<const std::uint8_t> data;
  std::span<const float> scales;
  std::span<const std::uint8_t> zeros;  ///< of groups
  int group = 0;                        ///< columns that share scale and zero; 0 = see the format
};

/// The kernel for launches of at most `max_rows` rows, e.g. "skinny.8".
struct Tactic {
  int max_rows = 0;
  std::string kernel;
};

/// A matrix, y[n] = W[n, k] · x[k]: packed in segments (target cpu) or whole (target cuda).
struct Linear {
  std::string name;
  int n = 0;
  int k = 0;
  int panels = 0;
  bool has_float = false;  ///< some segment reads float activations
  bool has_bf16 = false;   ///< some segment reads activations rounded to bfloat16
  bool has_block = false;  ///< some segment reads quantized activations
  std::vector<LinearSegment> segments;
  Matrix matrix;
  std::vector<Tactic> tactics;  ///< by max_rows, ascending; target cuda
};

struct RopeTable {
  std::span<const float> inv_freq;  ///< [rotary_dim / 2]
  float attention_factor = 1.0f;    ///< multiplies cos and sin (YaRN, LongRoPE)
};

struct KvLayer {
  int num_kv_heads = 0;
  int head_dim = 0;
  int window = 0;       ///< tokens; 0 = all
  int group = 0;        ///< indexes KvPlan::groups
  bool is_held = true;  ///< by this rank's pipeline stage; else it takes no memory here
};

/// Layers whose blocks live and die together. The groups are the same on all stages of a pipeline, with other layers.
struct KvGroup {
  int window = 0;           ///< the largest of its layers; 0 = all
  std::vector<int> layers;  ///< that are held
};

/// Elements of the KV cache of target cuda.
enum class DeviceKvType : std::uint8_t { kBf16, kFp8 };

struct KvPlan {
  Target target = Target::kCpu;
  cpu::KvType dtype = cpu::KvType::kF32;            ///< target cpu
  DeviceKvType device_dtype = DeviceKvType::kBf16;  ///< target cuda
  int tokens_per_block = 0;
  std::vector<KvLayer> layers;  ///< of the whole model
  std::vector<KvGroup> groups;  ///< as ModelShape::kv_groups

  /// Bytes of K (or of V) of one block of a layer.
  std::int64_t block_bytes(const KvLayer& layer) const noexcept {
    if (!layer.is_held) return 0;
    if (target == Target::kCuda) {
      const int element = device_dtype == DeviceKvType::kBf16 ? 2 : 1;
      return std::int64_t{element} * layer.num_kv_heads * layer.head_dim * tokens_per_block;
    }
    return layer.num_kv_heads * static_cast<std::int64_t>(cpu::kv_head_bytes(dtype, layer.head_dim, tokens_per_block));
  }
};

struct Heads {
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;

  int group() const noexcept { return num_heads / num_kv_heads; }
  int q_width() const noexcept { return num_heads * head_dim; }
  int kv_width() const noexcept { return num_kv_heads * head_dim; }
};

// Ops. `in`, `out` and `residual` index Plan::buffers; linears index Plan::linears; an absent vector is empty.

struct EmbeddingOp {
  int out = 0;
  int linear = 0;
  float scale = 1.0f;
  int vocab_begin = 0;  ///< token of the linear's first row
};

struct NormQkvRopeOp {
  int layer = 0;
  int in = 0;
  int out = 0;
  float eps = 0.0f;
  std::span<const float> norm;    ///< [k]
  int linear = 0;                 ///< rows Q‖K‖V
  std::span<const float> bias;    ///< [n]
  std::span<const float> q_norm;  ///< [head_dim]
  std::span<const float> k_norm;  ///< [head_dim]
  float qk_norm_eps = 0.0f;
  Heads heads;
  int rope = 0;  ///< indexes Plan::rope
};

struct PagedAttentionOp {
  int layer = 0;
  int in = 0;
  int out = 0;
  Heads heads;
  float scale = 1.0f;
  float softcap = 0.0f;  ///< 0 = off
  int window = 0;        ///< 0 = all
};

struct LinearResidualOp {
  int in = 0;
  int residual = 0;
  int out = 0;
  int linear = 0;
  std::span<const float> bias;       ///< [n]
  std::span<const float> post_norm;  ///< [n]
  float eps = 0.0f;
  bool all_reduce = false;  ///< the product is summed over the ranks first
};

struct NormSwigluOp {
  int in = 0;
  int out = 0;
  float eps = 0.0f;
  std::span<const float> norm;  ///< [k]
  int gate = 0;
  int up = 0;
  int gate_up = 0;                      ///< target cuda: both in one linear, interleaved by 8 rows
  std::span<const float> gate_bias;     ///< [n]
  std::span<const float> up_bias;       ///< [n]
  std::span<const float> gate_up_bias;  ///< [2n], as gate_up
  cpu::Activation activation = cpu::Activation::kSilu;
};

/// out = residual + Σ weight · down(act(gate · h) ⊙ (up · h)) over the `top_k` experts with the largest logits
/// router · h, h = RMSNorm(in). Matrices of all experts stand one under the other in one linear. `out` overlaps neither
/// `in` nor `residual`, which may be one buffer.
struct NormMoeOp {
  int in = 0;
  int residual = 0;
  int out = 0;
  float eps = 0.0f;
  std::span<const float> norm;    ///< [k]
  std::span<const float> router;  ///< [num_experts, k]
  int num_experts = 0;
  int top_k = 0;
  bool normalize = false;  ///< weights, softmax over all experts, are divided by the sum of the chosen ones
  int gate = 0;            ///< [num_experts · neurons, k], a segment per expert; target cpu, as `up`
  int up = 0;
  int gate_up = 0;  ///< [num_experts · 2 · neurons, k]; target cuda: an expert's rows of gate and up interleaved by 8
  int down = 0;     ///< [num_experts · width, neurons]
  int neurons = 0;  ///< of an expert, as far as this rank holds them, padding included
  cpu::Activation activation = cpu::Activation::kSilu;
  bool all_reduce = false;  ///< the sum over the experts is one over the ranks, too, before the residual is added
};

struct LmHeadOp {
  int in = 0;
  float eps = 0.0f;
  std::span<const float> norm;  ///< [k]
  int linear = 0;
  float softcap = 0.0f;         ///< 0 = off
  std::span<const float> bias;  ///< [vocab_size]
};

using Op =
    std::variant<EmbeddingOp, NormQkvRopeOp, PagedAttentionOp, LinearResidualOp, NormSwigluOp, NormMoeOp, LmHeadOp>;

/// The program of a step. Views point into the mapped file.
struct Plan {
  Target target = Target::kCpu;
  int sm = 0;  ///< target cuda: compute capability, e.g. 90
  int tp_size = 1;
  int tp_rank = 0;
  int pp_size = 1;
  int pp_rank = 0;
  int layer_begin = 0;  ///< layers of this stage: [layer_begin, layer_end)
  int layer_end = 0;
  int entering = -1;  ///< buffer of the residual stream as the stage before leaves it; -1 on the first
  int leaving = -1;   ///< buffer of what the next stage gets; -1 on the last
  int vocab_size = 0;
  int hidden_size = 0;
  int max_seq_len = 0;
  int max_num_tokens = 0;
  int max_batch_size = 0;
  std::int64_t arena_bytes = 0;
  std::vector<Buffer> buffers;
  std::vector<RopeTable> rope;
  KvPlan kv;
  std::vector<Linear> linears;
  std::vector<Op> ops;

  int num_ranks() const noexcept { return tp_size * pp_size; }
  int rank() const noexcept { return pp_rank * tp_size + tp_rank; }
  bool is_first_stage() const noexcept { return pp_rank == 0; }
  bool is_last_stage() const noexcept { return pp_rank == pp_size - 1; }

  /// Tokens whose rows of embedding and head this rank holds are [vocab_begin(), vocab_begin() + vocab_rows()).
  int vocab_begin() const noexcept { return vocab_share(tp_rank); }
  int vocab_rows() const noexcept { return vocab_share(tp_rank + 1) - vocab_share(tp_rank); }

  /// Rows of a buffer of target cuda.
  int device_rows() const noexcept { return (max_num_tokens + kDeviceRowStep - 1) / kDeviceRowStep * kDeviceRowStep; }
  std::int64_t buffer_bytes(const Buffer& buffer) const noexcept {
    if (target == Target::kCuda) return std::int64_t{2} * device_rows() * buffer.width;
    return std::int64_t{4} * max_num_tokens * buffer.width;
  }

 private:
  int vocab_share(int rank) const noexcept { return static_cast<int>(std::int64_t{vocab_size} * rank / tp_size); }
};

/// Puts each layer of `kv` into a group (and those that are held into its list): full attention first, then by window,
/// largest first. A window that reaches over `max_seq_len` is none. Where there are more windows than kMaxKvGroups
/// allows, the smallest join the last group, whose blocks are then kept for longer than those layers see.
void assign_kv_groups(KvPlan& kv, int max_seq_len);

/// Reads `__metadata__["plan"]` and proves that nothing which a step does with it can leave its memory: sizes of
/// tensors, widths of buffers, offsets in the arena, KV geometry, order of ops. Throws Error(kEngine) naming file,
/// field, expected and got; Error(kEngineIncompatible) for another version or target.
Plan parse_plan(const SafeTensors& file);

}  // namespace aotllm
