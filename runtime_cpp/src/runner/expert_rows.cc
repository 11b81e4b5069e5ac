#include "runner/expert_rows.h"

#include <algorithm>
#include <cmath>

namespace aotllm {
namespace {

/// e^x as the float nearest to it: the same on every machine.
float exponential(float x) {
  return static_cast<float>(std::exp(static_cast<double>(x)));
}

}  // namespace

void choose_experts(std::span<const float> logits, int top_k, bool normalize, std::int32_t* experts, float* weights) {
  const auto num_experts = static_cast<int>(logits.size());
  int count = 0;  // of `experts`, by logit, descending
  for (int e = 0; e < num_experts; ++e) {
    if (count == top_k && !(logits[e] > logits[experts[count - 1]])) continue;
    int at = count < top_k ? count++ : count - 1;
    for (; at > 0 && logits[e] > logits[experts[at - 1]]; --at) experts[at] = experts[at - 1];
    experts[at] = e;
  }
  const float largest = logits[experts[0]];
  std::sort(experts, experts + count);

  float total = 0.0f;
  for (int i = 0; i < count; ++i) {
    weights[i] = exponential(logits[experts[i]] - largest);
    total += weights[i];
  }
  if (!normalize) {
    total = 0.0f;
    for (const float logit : logits) total += exponential(logit - largest);
  }
  for (int i = 0; i < count; ++i) weights[i] /= total;
}

void group_by_expert(const std::int32_t* experts, const float* weights, int rows, int top_k, int num_experts,
                     const ExpertRows& to) {
  const int slots = rows * top_k;
  std::fill_n(to.first, num_experts + 1, 0);
  for (int i = 0; i < slots; ++i) ++to.first[experts[i] + 1];
  for (int e = 0; e < num_experts; ++e) to.first[e + 1] += to.first[e];
  // Filled in order of rows; each count moves its expert's begin to its end, which is the next one's begin.
  for (int i = 0; i < slots; ++i) {
    const int slot = to.first[experts[i]]++;
    to.row[slot] = i / top_k;
    to.weight[slot] = weights[i];
  }
  for (int e = num_experts; e > 0; --e) to.first[e] = to.first[e - 1];
  to.first[0] = 0;
}

}  // namespace aotllm
