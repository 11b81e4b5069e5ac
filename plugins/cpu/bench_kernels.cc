// Speed of the kernels on one thread: `bench_kernels [isa]`. Prints, per weight format, GB/s of packed weights for one
// activation row (decode) and GOP/s (multiplies and adds) for 4 and 64 rows; then attention in GB/s of KV cache read.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <vector>

#include "kernels.h"

namespace {

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

void bench_matmul(const Kernels& kernels, Format format, int n, int k) {
  constexpr int kMaxRows = 64;
  const std::size_t bytes = aotllm::cpu::panel_bytes(format, k) * static_cast<std::size_t>(n / 16);
  std::vector<std::uint8_t> storage;
  const Segment w{format, n, k, aligned(storage, bytes, 0x22)};
  const std::vector<float> x(static_cast<std::size_t>(kMaxRows * k), 0.5f);
  const std::vector<std::int8_t> q(x.size(), 3);
  const std::vector<float> scales(x.size() / 16, 0.01f);
  const std::vector<std::int32_t> sums(x.size() / 16, 48);
  const Activations a{x.data(), k, q.data(), scales.data(), sums.data()};
  std::vector<float> y(static_cast<std::size_t>(kMaxRows * n));
  const auto time = [&](int rows) { return seconds([&] { kernels.matmul(w, a, rows, 0, n / 16, y.data(), n); }); };
  const double operations = 2.0 * n * k;
  std::printf("  %-7s %6.2f bit  M=1 %6.2f GB/s  M=4 %7.1f GOP/s  M=64 %7.1f GOP/s\n", format_name(format),
              8.0 * static_cast<double>(bytes) / (static_cast<double>(n) * k),
              static_cast<double>(bytes) / time(1) / 1e9, 4 * operations / time(4) / 1e9,
              64 * operations / time(64) / 1e9);
}

const char* kv_type_name(KvType type) {
  return type == KvType::kF32 ? "f32 " : type == KvType::kF16 ? "f16 " : "int8";
}

/// `heads` KV heads in turn: one stays in the CPU's caches, many come from memory.
void bench_attention(const Kernels& kernels, KvType type, int group, int head_dim, int position, int heads) {
  const int blocks = position / 16 + 1;
  const std::size_t half = aotllm::cpu::kv_head_bytes(type, head_dim, 16);
  const std::size_t head_bytes = 2 * half * static_cast<std::size_t>(blocks);
  std::vector<std::uint8_t> storage;
  const std::uint8_t* base = aligned(storage, head_bytes * static_cast<std::size_t>(heads), 0x11);
  std::vector<std::int32_t> table;
  for (int i = 0; i < blocks; ++i) table.push_back(i);
  const std::vector<float> q(static_cast<std::size_t>(group * head_dim), 0.1f);
  std::vector<float> out(q.size());
  AttentionArgs args;
  args.q = q.data();
  args.out = out.data();
  args.group = group;
  args.head_dim = head_dim;
  args.kv_type = type;
  args.block_stride = static_cast<std::ptrdiff_t>(2 * half);
  args.block_table = table.data();
  args.position = position;
  const double time = seconds([&] {
    for (int head = 0; head < heads; ++head) {
      args.k_base = base + static_cast<std::size_t>(head) * head_bytes;
      args.v_base = args.k_base + half;
      kernels.attention(args);
    }
  });
  std::printf("  %s group %d head_dim %3d position %4d, %3d heads: %6.2f GB/s, %7.1f us a head\n", kv_type_name(type),
              group, head_dim, position, heads, static_cast<double>(head_bytes) * heads / time / 1e9,
              time / heads * 1e6);
}

void bench_attentions(const Kernels& kernels) {
  constexpr KvType kTypes[] = {KvType::kF32, KvType::kF16, KvType::kI8};
  for (const int position : {1023, 4095}) {
    for (const int group : {1, 3, 4}) {
      for (const KvType type : kTypes) bench_attention(kernels, type, group, 64, position, 1);
    }
  }
  for (const KvType type : kTypes) bench_attention(kernels, type, 4, 128, 4095, 1);
  for (const KvType type : kTypes) bench_attention(kernels, type, 4, 128, 4095, 48);
}

}  // namespace

int main(int argc, char** argv) {
  const Kernels* kernels = argc > 1 ? aotllm::cpu::kernels_for(argv[1]) : &aotllm::cpu::kernels();
  if (kernels == nullptr) {
    std::fprintf(stderr, "this CPU cannot run '%s'; name one of avx2, avx512, avx512_vnni\n", argv[1]);
    return 4;
  }
  constexpr int kRows = 2048;
  constexpr int kColumns = 2048;
  std::printf("%s, one thread\nmatmul %d x %d\n", kernels->isa, kRows, kColumns);
  for (int i = 0; i <= static_cast<int>(Format::kQ8_F32); ++i) {
    bench_matmul(*kernels, static_cast<Format>(i), kRows, kColumns);
  }
  std::printf("attention, one query\n");
  bench_attentions(*kernels);
  std::vector<float> x(4096, 0.3f), y(4096);
  std::vector<std::int8_t> q(4096);
  std::vector<float> scales(256);
  std::vector<std::int32_t> sums(256);
  std::printf("quantize 4096: %.2f us\n",
              1e6 * seconds([&] { kernels->quantize(x.data(), 4096, q.data(), scales.data(), sums.data()); }));
  std::printf("rms_norm 4096: %.2f us\n",
              1e6 * seconds([&] { kernels->rms_norm(x.data(), x.data(), 1e-5f, 4096, y.data()); }));
  std::printf(
      "silu 4096: %.2f us\n",
      1e6 * seconds([&] { kernels->act_mul(aotllm::cpu::Activation::kSilu, x.data(), x.data(), 4096, y.data()); }));
  return 0;
}
