#pragma once

#include "attention/context_attention_kernel.cuh"
#include "attention/context_parameters.h"

namespace aotllm::cuda::context {

template <int headDim, bool softcap>
void launch_capped(const Parameters& parameters, bool fp8, int blocks, const Stream& stream) {
  if (fp8) {
    launch_kernel<Config<headDim, true, softcap, 1>>(parameters, blocks, stream);
  } else if (parameters.group % 2 == 0) {
    launch_kernel<Config<headDim, false, softcap, 2>>(parameters, blocks, stream);
  } else {
    launch_kernel<Config<headDim, false, softcap, 1>>(parameters, blocks, stream);
  }
}

template <int headDim>
void launch_head_dim(const Parameters& parameters, bool fp8, bool softcap, int blocks, const Stream& stream) {
  softcap ? launch_capped<headDim, true>(parameters, fp8, blocks, stream)
          : launch_capped<headDim, false>(parameters, fp8, blocks, stream);
}

}  // namespace aotllm::cuda::context
