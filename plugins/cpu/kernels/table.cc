#include "kernels/ops.h"

#define AOTLLM_STRINGIFY_(x) #x
#define AOTLLM_STRINGIFY(x) AOTLLM_STRINGIFY_(x)

namespace aotllm::cpu::AOTLLM_ISA {

extern const Kernels kTable = {
    AOTLLM_STRINGIFY(AOTLLM_ISA),
    rms_norm,
    quantize,
    rms_norm_quantize,
    to_bf16,
    matmul,
    dequantize_row,
    rope,
    store_kv,
    attention,
    attention_range,
    merge_attention,
    act_mul,
    add,
    add_scaled,
    softcap,
    dot_rows,
    widen,
    e4m3_scale,
    e4m3_codes,
};

}  // namespace aotllm::cpu::AOTLLM_ISA
