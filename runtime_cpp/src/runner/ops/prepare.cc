#include <algorithm>

#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {
namespace {

/// Normalizes or picks rows `share` of the input where that is asked for, and quantizes them, into `to`.
void prepare_rows(const Worker& worker, const Input& input, Range share, const ActivationRows& to, bool need_float,
                  bool need_block) {
  const cpu::Kernels& kernels = worker.step.kernels;
  const std::ptrdiff_t k = input.k;
  for (std::int64_t row = share.begin; row < share.end; ++row) {
    const float* x = input.x + (input.pick.empty() ? row : input.pick[row]) * k;
    if (input.copied()) {
      float* y = need_float ? to.x + row * k : worker.own().row.x;
      if (input.norm.empty()) {
        std::copy_n(x, k, y);
      } else {
        kernels.rms_norm(x, input.norm.data(), input.eps, input.k, y);
      }
      x = y;
    }
    if (need_block) {
      kernels.quantize(x, input.k, to.q + row * k, to.scales + row * (k / cpu::kActivationBlock),
                       to.sums + row * (k / 16));
    }
  }
}

}  // namespace

cpu::Activations prepare(const Worker& worker, const Input& input, std::initializer_list<int> linears) {
  const StepContext& step = worker.step;
  const int first = *linears.begin();
  const bool updated = input.pick.empty() && step.lora.updates(first);  // picked rows are the head's: no adapters there
  bool need_float = updated;
  bool need_block = false;
  for (const int linear : linears) {
    need_float |= step.plan.linears[linear].has_float;
    need_block |= step.plan.linears[linear].has_block;
  }
  const bool alone = input.rows == 1;
  const ActivationRows& to = alone ? worker.own().row : step.space.rows();
  cpu::Activations a;
  if (need_float) {
    a.x = input.copied() ? to.x : input.x;
    a.x_stride = input.k;
  }
  if (need_block) {
    a.q = to.q;
    a.scales = to.scales;
    a.sums = to.sums;
  }

  const Range share = alone ? Range{0, 1} : split(input.rows, worker.index, worker.count);
  const bool writes = input.copied() || need_block;
  if (writes) prepare_rows(worker, input, share, to, need_float, need_block);
  // A · x: by the thread that has prepared the row, or where rows are fewer than threads, shared out once they are
  // there.
  const bool whole_rows = input.rows >= worker.count;
  if (updated && whole_rows) step.lora.shrink(step.kernels, first, a, share, 0, 1);
  if (!alone && (writes || (updated && whole_rows))) worker.barrier();
  if (updated && !whole_rows) {
    step.lora.shrink(step.kernels, first, a, {0, input.rows}, worker.index, worker.count);
    worker.barrier();
  }
  return a;
}

}  // namespace aotllm
