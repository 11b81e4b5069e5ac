#include <algorithm>

#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {
namespace {

/// The forms in which linears read an input.
struct Forms {
  bool x = false;
  bool bf16 = false;
  bool block = false;
};

/// Normalizes or picks rows `share` of the input where that is asked for, rounds and quantizes them, into `to`.
void prepare_rows(const Worker& worker, const Input& input, Range share, const ActivationRows& to, Forms need) {
  const cpu::Kernels& kernels = worker.step.kernels;
  const std::ptrdiff_t k = input.k;
  const bool fused = !input.norm.empty() && need.block && !need.x && !need.bf16;  // nobody reads the normalized floats
  for (std::int64_t row = share.begin; row < share.end; ++row) {
    const float* x = input.x + (input.pick.empty() ? row : input.pick[row]) * k;
    cpu::ActivationBlock* blocks = to.blocks + row * cpu::activation_stride(input.k);
    if (fused) {
      kernels.rms_norm_quantize(x, input.norm.data(), input.eps, input.k, blocks);
      continue;
    }
    if (input.copied()) {
      float* y = need.x ? to.x + row * k : worker.own().row.x;
      if (input.norm.empty()) {
        std::copy_n(x, k, y);
      } else {
        kernels.rms_norm(x, input.norm.data(), input.eps, input.k, y);
      }
      x = y;
    }
    if (need.bf16) kernels.to_bf16(x, input.k, to.bf16 + row * cpu::bf16_stride(input.k));
    if (need.block) kernels.quantize(x, input.k, blocks);
  }
}

}  // namespace

cpu::Activations prepare(const Worker& worker, const Input& input, std::initializer_list<int> linears) {
  const PartScope part(worker.clock, StepPart::kPrepare);
  const StepContext& step = worker.step;
  const int first = *linears.begin();
  const bool updated = input.pick.empty() && step.lora.updates(first);  // picked rows are the head's: no adapters there
  Forms need{updated};
  for (const int linear : linears) {
    need.x |= step.plan.linears[linear].has_float;
    need.bf16 |= step.plan.linears[linear].has_bf16;
    need.block |= step.plan.linears[linear].has_block;
  }
  const bool alone = input.rows == 1;
  const ActivationRows& to = alone ? worker.own().row : step.space.rows();
  cpu::Activations a;
  if (need.x) {
    a.x = input.copied() ? to.x : input.x;
    a.x_stride = input.k;
  }
  if (need.bf16) a.bf16 = to.bf16;
  if (need.block) a.blocks = to.blocks;

  const Range share = alone ? Range{0, 1} : split(input.rows, worker.index, worker.count);
  const bool writes = input.copied() || need.bf16 || need.block;
  if (writes) prepare_rows(worker, input, share, to, need);
  // A · x: by the thread that has prepared the row, or where rows are fewer than threads, shared out once they are
  // there.
  const bool whole_rows = input.rows >= worker.count;
  if (updated && whole_rows) step.lora.shrink(step.kernels, first, a, share, 0, 1);
  const bool own = worker.owns_rows && input.pick.empty();
  if (!alone && !own && (writes || (updated && whole_rows))) worker.barrier();
  if (updated && !whole_rows) {
    step.lora.shrink(step.kernels, first, a, {0, input.rows}, worker.index, worker.count);
    worker.barrier();
  }
  return a;
}

}  // namespace aotllm
