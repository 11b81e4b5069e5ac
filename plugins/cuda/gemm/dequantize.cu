#include "gemm/dequantize.h"

#include <string>

#include "aotllm/errors.h"
#include "chain.cuh"
#include "gemm/int_layout.h"

namespace aotllm::cuda {
namespace {

constexpr int kThreads = 256;

struct DequantizeArgs {
  const std::uint8_t* codes;
  const float* scales;
  const std::uint8_t* zeros;
  __nv_bfloat16* out;
  int n, k, k_blocks;
};

constexpr int kPitch = kIntColumns + 8;  // of a row in shared memory: threads that write together meet no bank twice

/// A block of 64 rows × 128 columns per CTA: threads read codes 16 bytes at a time as they lie, leave weights in shared
/// memory, and write rows.
template <IntFormat kFormat>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const DequantizeArgs args) {
  constexpr bool kFour = int_has_four_bits(kFormat);
  constexpr int kBytes = int_block_bytes(kFormat);
  constexpr int kGroups = int_groups(kFormat);
  constexpr int kPieces = kBytes / 16 / kThreads;
  constexpr int kSteps = kFour ? 4 : 2;  // of 16 columns in a piece
  __shared__ __align__(16) __nv_bfloat16 tile[kIntRows][kPitch];
  const std::size_t index = static_cast<std::size_t>(blockIdx.y) * args.k_blocks + blockIdx.x;
  const auto* codes = reinterpret_cast<const uint4*>(args.codes + index * kBytes);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = i * kThreads + static_cast<int>(threadIdx.x);
    const uint4 words = __ldcs(codes + piece);
    const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
    const int thread = piece % 128;
    const int row = thread / 32 * 16 + thread % 32 / 4;
    const int first = piece / 128 * kSteps * 16;  // column; of it a group at most
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int n = static_cast<int>(blockIdx.y) * kIntRows + row + 8 * lower;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int column = first + 16 * step + thread % 4 * 2;
        float scale = 0.0f;
        int zero = 0;
        if constexpr (kGroups == 0) {
          if (n < args.n) scale = __ldg(args.scales + n);
        } else {
          const std::size_t at = (index * kGroups + column / (kIntColumns / kGroups)) * kIntRows + row + 8 * lower;
          scale = __ldg(args.scales + at);
          zero = __ldg(args.zeros + at) - (kFour ? 0 : 128);
        }
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          int code[2];
          if constexpr (kFour) {
            const std::uint32_t pair = word[step] >> 4 * (2 * right + lower) & 0x000F000F;
            code[0] = static_cast<int>(pair & 0xFFFF), code[1] = static_cast<int>(pair >> 16);
          } else {
            const std::uint32_t pair = word[2 * step + lower] >> 8 * right;
            code[0] = static_cast<std::int8_t>(pair), code[1] = static_cast<std::int8_t>(pair >> 16);
          }
          *reinterpret_cast<__nv_bfloat162*>(&tile[row + 8 * lower][column + 8 * right]) = __floats2bfloat162_rn(
              scale * static_cast<float>(code[0] - zero), scale * static_cast<float>(code[1] - zero));
        }
      }
    }
  }
  __syncthreads();
  release_successor();
  wait_for_predecessor();  // `out` is scratch that the kernel before may read
  constexpr int kEights = kIntColumns / 8;
#pragma unroll
  for (int i = 0; i < kIntRows * kEights / kThreads; ++i) {
    const int row = (i * kThreads + static_cast<int>(threadIdx.x)) / kEights;
    const int column = static_cast<int>(threadIdx.x) % kEights * 8;
    const int n = static_cast<int>(blockIdx.y) * kIntRows + row;
    const int k = static_cast<int>(blockIdx.x) * kIntColumns + column;
    if (n >= args.n || k >= args.k) continue;
    *reinterpret_cast<uint4*>(args.out + static_cast<std::size_t>(n) * args.k + k) =
        *reinterpret_cast<const uint4*>(&tile[row][column]);
  }
}

class DequantGemm : public Gemm {
 public:
  DequantGemm(const Weights& w, __nv_bfloat16* scratch, std::unique_ptr<Gemm> inner)
      : w_(w), scratch_(scratch), inner_(std::move(inner)) {}

  void launch(int m, const Stream& stream) const override {
    dequantize(w_, scratch_, stream);
    inner_->launch(m, {stream.handle, false});  // it may not touch W before that is written
  }
  int max_rows() const override { return inner_->max_rows(); }
  std::string name() const override { return "dequant." + inner_->name(); }

 private:
  Weights w_;
  __nv_bfloat16* scratch_;
  std::unique_ptr<Gemm> inner_;
};

}  // namespace

void dequantize(const Weights& w, __nv_bfloat16* out, const Stream& stream) {
  IntShape shape;
  if (!int_shape(w, shape)) {
    throw Error(ErrorKind::kInternal,
                "dequantize: got a matrix that is not of integers, or of a size it does not take");
  }
  const DequantizeArgs args{static_cast<const std::uint8_t*>(w.data), w.scales, w.zeros, out, w.n, w.k, shape.k_blocks};
  const dim3 grid(static_cast<unsigned>(shape.k_blocks), static_cast<unsigned>(shape.strips));
  switch (shape.format) {
    case IntFormat::kInt4Group128:
      return cuda::launch(dequantize_kernel<IntFormat::kInt4Group128>, grid, dim3(kThreads), 0, stream, args);
    case IntFormat::kInt4Group32:
      return cuda::launch(dequantize_kernel<IntFormat::kInt4Group32>, grid, dim3(kThreads), 0, stream, args);
    case IntFormat::kInt8Row:
      return cuda::launch(dequantize_kernel<IntFormat::kInt8Row>, grid, dim3(kThreads), 0, stream, args);
    case IntFormat::kInt8Group32:
      return cuda::launch(dequantize_kernel<IntFormat::kInt8Group32>, grid, dim3(kThreads), 0, stream, args);
  }
}

std::size_t dequant_workspace_bytes(int n, int k) {
  return kWorkspaceBytes + static_cast<std::size_t>(n) * static_cast<std::size_t>(k) * sizeof(__nv_bfloat16);
}

std::unique_ptr<Gemm> make_dequant_gemm(const GemmProblem& problem, Workspace workspace, const MakeGemm& make_inner) {
  IntShape shape;
  if (!int_shape(problem.w, shape)) return nullptr;
  if (workspace.bytes < dequant_workspace_bytes(problem.w.n, problem.w.k)) return nullptr;
  auto* scratch = reinterpret_cast<__nv_bfloat16*>(static_cast<std::uint8_t*>(workspace.data) + kWorkspaceBytes);
  GemmProblem inner = problem;
  inner.w = {WeightType::kBf16, problem.w.n, problem.w.k, scratch};
  auto gemm = make_inner(inner, {workspace.data, kWorkspaceBytes});
  return gemm == nullptr ? nullptr : std::make_unique<DequantGemm>(problem.w, scratch, std::move(gemm));
}

}  // namespace aotllm::cuda
