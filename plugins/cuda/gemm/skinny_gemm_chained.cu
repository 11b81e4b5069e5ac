#include "gemm/skinny_kernel.cuh"

namespace aotllm::cuda {

SkinnyKernel skinny_kernel_chained(int rows_tile, int rows, int sub, SkinnyRole role) {
  const int shape = rows * 10 + sub;
  if (rows_tile == 8 && shape == 642) return skinny_chained_kernel<8, 64, 2>(role);
  if (rows_tile == 8 && shape == 644) return skinny_chained_kernel<8, 64, 4>(role);
  if (rows_tile == 8 && shape == 1281) return skinny_chained_kernel<8, 128, 1>(role);
  if (rows_tile == 16 && shape == 642) return skinny_chained_kernel<16, 64, 2>(role);
  if (rows_tile == 16 && shape == 1281) return skinny_chained_kernel<16, 128, 1>(role);
  return {};
}

}  // namespace aotllm::cuda
