#include "attention/decode_kernel.cuh"

namespace aotllm::cuda {

void launch_decode_fp8(const DecodeAttentionArgs& args, const DecodeTuning& tuning, const DecodeParams& params,
                       const Stream& stream) {
  launch_decode<KvType::kFp8>(args, tuning, params, stream);
}

}  // namespace aotllm::cuda
