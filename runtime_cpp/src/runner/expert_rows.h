#pragma once

#include <cstdint>
#include <span>

namespace aotllm {

/// Which experts the rows of a step chose, and the same the other way round. A *slot* is one choice of one row; slots
/// are numbered by expert, then by row, so that the rows of an expert are neighbours.
struct ExpertRows {
  std::int32_t* first = nullptr;  ///< [num_experts + 1]: slots [first[e], first[e + 1]) are those of expert e
  std::int32_t* row = nullptr;    ///< [slots]
  float* weight = nullptr;        ///< [slots]

  int rows_of(int expert) const noexcept { return first[expert + 1] - first[expert]; }
};

/// The `top_k` experts of one row: those with the largest logits, of equal ones the lower index. Writes them in
/// ascending order to `experts` [top_k] and their weights to `weights` [top_k]: softmax over all experts, divided by
/// the sum of the chosen ones' where `normalize` says so. Whatever the logits hold, the experts are distinct and exist.
void choose_experts(std::span<const float> logits, int top_k, bool normalize, std::int32_t* experts, float* weights);

/// Fills `to` with the choices of all rows: `experts` and `weights` are [rows, top_k].
void group_by_expert(const std::int32_t* experts, const float* weights, int rows, int top_k, int num_experts,
                     const ExpertRows& to);

}  // namespace aotllm
