#include "attention/context_attention_launch.cuh"

template void aotllm::cuda::context::launch_head_dim<64>(const Parameters&, bool, bool, int, const Stream&);
