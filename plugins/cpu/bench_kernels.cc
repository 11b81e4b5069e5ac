// Speed of the kernels on one thread: `bench_kernels [isa]`. Prints, per weight format, GB/s of packed weights for one
// activation row (decode) and GOP/s (multiplies and adds) by row count; then attention in GB/s of KV cache read.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <vector>

#include "kernels.h"

namespace {

using aotllm::cpu::ActivationBlock;
using aotllm::cpu::Activations;
using aotllm::cpu::AttentionArgs;
using aotllm::cpu::Format;
using aotllm::cpu::Kernels;
using aotllm::cpu::KvType;
using aotllm::cpu::Segment;

constexpr double kMinimumSeconds = 0.1;
constexpr double kSampleSeconds = 0.01;  ///< of one measurement: some systems count a thread's time in milliseconds

/// CPU time of this thread in seconds: other processes do not count.
double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Seconds of one call, the best of several samples.
template <class Run>
double seconds(Run run) {
  const auto sample = [&](int calls) {
    const double before = thread_seconds();
    for (int i = 0; i < calls; ++i) run();
    return thread_seconds() - before;
  };
  int calls = 1;
  while (sample(calls) < kSampleSeconds) calls *= 2;
  double best = 1e9;
  const double start = thread_seconds();
  do best = std::min(best, sample(calls) / calls);
  while (thread_seconds() - start < kMinimumSeconds);
  return best;
}

std::uint8_t* aligned(std::vector<std::uint8_t>& storage, std::size_t bytes, int fill) {
  storage.assign(bytes + 64, static_cast<std::uint8_t>(fill));
  return storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
}

/// `bytes` of matrices that are multiplied in turn: as many come from memory as do not fit the CPU's caches.
void bench_matmul(const Kernels& kernels, Format format, int n, int k, std::size_t bytes) {
  constexpr int kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64};
  const std::size_t each = aotllm::cpu::panel_bytes(format, k) * static_cast<std::size_t>(n / 16);
  const std::size_t count = std::max<std::size_t>(bytes / each, 1);
  std::vector<std::uint8_t> storage;
  Segment w{format, n, k, aligned(storage, each * count, 0x22)};
  const std::uint8_t* first = w.panels;
  const std::vector<float> x(static_cast<std::size_t>(64 * k), 0.5f);
  std::vector<ActivationBlock> blocks(static_cast<std::size_t>(64 * aotllm::cpu::activation_stride(k)));
  for (int row = 0; row < 64; ++row) {
    kernels.quantize(x.data() + row * k, k, blocks.data() + row * aotllm::cpu::activation_stride(k));
  }
  const std::vector<std::uint16_t> bf16(static_cast<std::size_t>(64 * aotllm::cpu::bf16_stride(k)), 0x3F00);
  const Activations a{x.data(), k, blocks.data(), bf16.data()};
  std::vector<float> y(static_cast<std::size_t>(64 * n));
  std::printf("  %-7s", format_name(format));
  std::size_t next = 0;
  for (const int rows : kRows) {
    const double time = seconds([&] {
      w.panels = first + next++ % count * each;
      kernels.matmul(w, a, rows, 0, n / 16, y.data(), n);
    });
    if (rows == 1) std::printf(" %5.1f GB/s |", static_cast<double>(each) / time / 1e9);
    std::printf(" %5.0f", 2.0 * rows * n * k / time / 1e9);
  }
  std::printf("\n");
}

void bench_matmuls(const Kernels& kernels) {
  constexpr int kRows = 576;
  constexpr int kColumns = 1536;
  constexpr std::size_t kTooMuch = std::size_t{96} << 20;
  for (const std::size_t bytes : {std::size_t{0}, kTooMuch}) {
    std::printf("matmul %d x %d, weights %s; GOP/s of 1 … 8, 16, 32, 64 rows\n", kRows, kColumns,
                bytes == 0 ? "in cache" : "from memory");
    for (int i = 0; i <= static_cast<int>(Format::kQ4_1_G128); ++i) {
      bench_matmul(kernels, static_cast<Format>(i), kRows, kColumns, bytes);
    }
  }
}

const char* kv_type_name(KvType type) {
  return type == KvType::kF32 ? "f32" : type == KvType::kBF16 ? "bf16" : type == KvType::kI16 ? "int16" : "int8";
}

struct AttentionCase {
  int rows = 1;  ///< of one sequence, the last ones before `depth`
  int heads = 3;
  int head_dim = 64;
  int depth = 1024;
  int kv_heads = 1;  ///< in turn: one stays in the CPU's caches, many come from memory
};

void bench_attention(const Kernels& kernels, KvType type, const AttentionCase& c) {
  const int blocks = (c.depth + 15) / 16;
  const std::size_t half = aotllm::cpu::kv_head_bytes(type, c.head_dim, 16);
  const std::size_t head_bytes = 2 * half * static_cast<std::size_t>(blocks);
  std::vector<std::uint8_t> storage;
  const std::uint8_t* base = aligned(storage, head_bytes * static_cast<std::size_t>(c.kv_heads), 0x11);
  std::vector<std::int32_t> table;
  for (int i = 0; i < blocks; ++i) table.push_back(i);
  const std::vector<float> q(static_cast<std::size_t>(c.rows * c.heads * c.head_dim), 0.1f);
  std::vector<float> out(q.size());
  AttentionArgs args;
  args.q = q.data();
  args.out = out.data();
  args.row_stride = c.heads * c.head_dim;
  args.rows = c.rows;
  args.heads = c.heads;
  args.head_dim = c.head_dim;
  args.kv_type = type;
  args.block_stride = static_cast<std::ptrdiff_t>(2 * half);
  args.block_table = table.data();
  args.position = c.depth - c.rows;
  const double time = seconds([&] {
    for (int head = 0; head < c.kv_heads; ++head) {
      args.k_base = base + static_cast<std::size_t>(head) * head_bytes;
      args.v_base = args.k_base + half;
      kernels.attention(args);
    }
  });
  const double operations = 4.0 * c.rows * c.heads * c.head_dim * c.depth * c.kv_heads;
  std::printf(
      "  %-5s %2d rows x %d heads, head_dim %3d, depth %4d, %2d KV heads: %8.1f us each, %5.1f GB/s, %6.1f GOP/s\n",
      kv_type_name(type), c.rows, c.heads, c.head_dim, c.depth, c.kv_heads, time / c.kv_heads * 1e6,
      static_cast<double>(head_bytes) * c.kv_heads / time / 1e9, operations / time / 1e9);
}

void bench_attentions(const Kernels& kernels) {
  constexpr KvType kTypes[] = {KvType::kF32, KvType::kBF16, KvType::kI16, KvType::kI8};
  for (const KvType type : kTypes) {
    for (const int heads : {1, 3, 4, 7}) bench_attention(kernels, type, {.heads = heads});
    for (const int depth : {128, 512, 4096}) bench_attention(kernels, type, {.depth = depth});
    for (const int rows : {2, 4, 8, 16}) bench_attention(kernels, type, {.rows = rows, .depth = 512});
    bench_attention(kernels, type, {.heads = 4, .head_dim = 128, .depth = 4096});
    bench_attention(kernels, type, {.depth = 4096, .kv_heads = 96});
    bench_attention(kernels, type, {.heads = 4, .head_dim = 128, .depth = 4096, .kv_heads = 48});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Kernels* kernels = argc > 1 ? aotllm::cpu::kernels_for(argv[1]) : &aotllm::cpu::kernels();
  if (kernels == nullptr) {
    std::fprintf(stderr, "this CPU cannot run '%s'; name one of avx2, avx512, avx512_vnni, avx512_bf16, amx\n",
                 argv[1]);
    return 4;
  }
  std::printf("%s, one thread\n", kernels->isa);
  bench_matmuls(*kernels);
  std::printf("attention\n");
  bench_attentions(*kernels);
  std::vector<float> x(4096, 0.3f), y(4096);
  std::vector<ActivationBlock> blocks(static_cast<std::size_t>(aotllm::cpu::activation_stride(4096)));
  std::printf("quantize 4096: %.2f us\n", 1e6 * seconds([&] { kernels->quantize(x.data(), 4096, blocks.data()); }));
  std::printf("rms_norm_quantize 4096: %.2f us\n",
              1e6 * seconds([&] { kernels->rms_norm_quantize(x.data(), x.data(), 1e-5f, 4096, blocks.data()); }));
  std::printf("rms_norm 4096: %.2f us\n",
              1e6 * seconds([&] { kernels->rms_norm(x.data(), x.data(), 1e-5f, 4096, y.data()); }));
  std::printf(
      "silu 4096: %.2f us\n",
      1e6 * seconds([&] { kernels->act_mul(aotllm::cpu::Activation::kSilu, x.data(), x.data(), 4096, y.data()); }));
  return 0;
}
