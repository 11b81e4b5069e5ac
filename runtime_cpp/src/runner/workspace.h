#pragma once

#include <cstdint>
#include <vector>

#include "engine/plan.h"
#include "runner/expert_rows.h"
#include "runner/linear.h"
#include "support/page_buffer.h"

namespace aotllm {

/// Normalized, rounded and quantized rows of one op's input, dense in the op's own k.
struct ActivationRows {
  float* x = nullptr;                      ///< [rows, k]
  cpu::ActivationBlock* blocks = nullptr;  ///< [rows, activation_stride(k)]
  std::uint16_t* bf16 = nullptr;           ///< [rows, cpu::bf16_stride(k)]
};

/// Memory of one thread.
struct ThreadSpace {
  ActivationRows row;        ///< of one row
  float* tile = nullptr;     ///< [kMaxTileRows, tile width]
  float* tile_up = nullptr;  ///< the same, for the second of two products
  ExpertRows experts;        ///< of the op at hand; null where the plan has no norm_moe
};

/// What `norm_moe` needs besides, null where the plan has none. A slot is a choice of a row (`ExpertRows`).
struct ExpertSpace {
  float* logits = nullptr;          ///< [rows, num_experts]
  std::int32_t* choices = nullptr;  ///< [rows, top_k]
  float* weights = nullptr;         ///< [rows, top_k]
  ActivationRows in;                ///< [slots, width], as far as the weights read it
  ActivationRows gated;             ///< [slots, neurons]
};

/// What paged_attention needs where threads share the ranges of some rows' context.
struct AttentionSpace {
  float* partials = nullptr;        ///< [num_threads - 1, partial_floats]: of the calls that several threads share
  std::int64_t partial_floats = 0;  ///< of all ranges of such a call
  std::int32_t* done = nullptr;     ///< [num_threads - 1]: ranges of such a call that are done; 0 between ops
};

/// Everything that a step writes besides the logits and the KV pool: the arena of the plan's buffers and what the ops
/// need inside. Sized from the plan and allocated once.
class Workspace {
 public:
  /// `units`: per layer, the units of its norm_qkv_rope.
  Workspace(const Plan& plan, const std::vector<std::vector<QkvUnit>>& units, int num_threads);

  /// Buffer `index` of the plan: [max_num_tokens, width].
  float* buffer(int index) const noexcept { return buffers_[index]; }
  const ActivationRows& rows() const noexcept { return rows_; }
  /// Products that are not added as they are made: [max_num_tokens, widest linear whose product is summed over ranks or
  /// normalized first]
  float* products() const noexcept { return products_; }
  /// [max_num_tokens, half] of RoPE table `table`.
  float* cos(int table) const noexcept { return cos_[table]; }
  float* sin(int table) const noexcept { return sin_[table]; }
  const ExpertSpace& experts() const noexcept { return experts_; }
  const AttentionSpace& attention() const noexcept { return attention_; }
  const ThreadSpace& thread(int index) const noexcept { return threads_[index]; }

 private:
  PageBuffer memory_;
  std::vector<float*> buffers_;
  ActivationRows rows_;
  float* products_ = nullptr;
  std::vector<float*> cos_;
  std::vector<float*> sin_;
  ExpertSpace experts_;
  AttentionSpace attention_;
  std::vector<ThreadSpace> threads_;
};

}  // namespace aotllm
