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

/// CPU time of this thread in seconds: other processes do not count.
double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Seconds of one call, the best of several.
template <class Run>
double seconds(Run run) {
  run();
  double best = 1e9;
  const double start = thread_seconds();
  do {
    const double before = thread_seconds();
    run();
    best = std::min(best, thread_seconds() - before);
  } while (thread_seconds() - start < kMinimumSeconds);
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

void bench_attention(const Kernels& kernels, KvType type, int group, int head_dim, int position) {
  const int blocks = position / 16 + 1;
  const std::size_t half = static_cast<std::size_t>(16 * head_dim) * (type == KvType::kF32 ? 4 : 2);
  std::vector<std::uint8_t> storage;
  const std::uint8_t* base = aligned(storage, 2 * half * static_cast<std::size_t>(blocks), 0x11);
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
  args.k_base = base;
  args.v_base = base + half;
  args.block_stride = static_cast<std::ptrdiff_t>(2 * half);
  args.block_table = table.data();
  args.position = position;
  const double time = seconds([&] { kernels.attention(args); });
  std::printf("  %s group %d head_dim %3d position %d: %6.2f GB/s, %6.1f us\n", type == KvType::kF32 ? "f32" : "f16",
              group, head_dim, position, 2.0 * static_cast<double>(half) * blocks / time / 1e9, time * 1e6);
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
  for (const KvType type : {KvType::kF32, KvType::kF16}) {
    for (const int group : {1, 3, 4}) bench_attention(*kernels, type, group, 64, 1023);
  }
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
