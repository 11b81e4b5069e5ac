#include <algorithm>

#include "runner/ops.h"
#include "runner/partition.h"

namespace aotllm {

cpu::Activations prepare(const Worker& worker, const Input& input, bool need_float, bool need_block) {
  const cpu::Kernels& kernels = worker.step.kernels;
  const std::ptrdiff_t k = input.k;
  const bool normalize = !input.norm.empty();
  const bool copy = normalize || !input.pick.empty();  // else float linears read the input where it is
  const bool alone = input.rows == 1;
  const ActivationRows& to = alone ? worker.own().row : worker.step.space.rows();

  cpu::Activations result;
  if (need_float) {
    result.x = copy ? to.x : input.x;
    result.x_stride = k;
  }
  if (need_block) {
    result.q = to.q;
    result.scales = to.scales;
    result.sums = to.sums;
  }
  if (!copy && !need_block) return result;

  const Range share = alone ? Range{0, 1} : split(input.rows, worker.index, worker.count);
  for (std::int64_t row = share.begin; row < share.end; ++row) {
    const float* x = input.x + (input.pick.empty() ? row : input.pick[row]) * k;
    if (copy) {
      float* y = need_float ? to.x + row * k : worker.own().row.x;
      if (normalize) {
        kernels.rms_norm(x, input.norm.data(), input.eps, input.k, y);
      } else {
        std::copy_n(x, k, y);
      }
      x = y;
    }
    if (need_block) {
      kernels.quantize(x, input.k, to.q + row * k, to.scales + row * (k / cpu::kActivationBlock),
                       to.sums + row * (k / 16));
    }
  }
  if (!alone) worker.barrier();
  return result;
}

}  // namespace aotllm
