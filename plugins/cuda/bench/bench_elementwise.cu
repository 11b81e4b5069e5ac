#include <cstdio>
#include <vector>

#include "bench/random_data.cuh"
#include "bench/timing.h"
#include "device_array.h"
#include "elementwise/elementwise.h"
#include "elementwise/rms_norm_plan.h"

// The kernels between GEMMs: time and bytes moved against the card's copy rate. Data rotate over more than the L2.
namespace aotllm::cuda {
namespace {

constexpr double kLimit = 4265e9;
constexpr std::size_t kPool = std::size_t{96} << 20;  // elements
constexpr int kHeads = 32;
constexpr int kKvHeads = 8;
constexpr int kHeadDim = 128;
constexpr int kTokensPerBlock = 64;

struct Pools {
  DeviceArray<__nv_bfloat16> in{kPool};
  DeviceArray<__nv_bfloat16> out{kPool};
  DeviceArray<float> scales{kPool / 128};
  DeviceArray<float> weight{32768};
  DeviceArray<std::int32_t> tokens{4096};
  DeviceArray<std::int32_t> zeros{65536};

  Pools() {
    fill_random(in.data(), kPool, 1.0f);
    fill_random(weight.data(), weight.size(), 1.0f);
    std::vector<std::int32_t> ids(tokens.size());
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 2654435761u % 6000);
    tokens.upload(ids);
    zeros.fill(0);
  }
};

// Where call `i` on `count` elements finds its part of a pool.
std::size_t part(int i, std::size_t count) {
  return i % std::max<std::size_t>(1, kPool / count) * count;
}

void report(const char* name, int m, int width, double bytes, double seconds) {
  std::printf("%-24s m %5d width %5d %8.2f us %6.0f GB/s %4.0f %%\n", name, m, width, seconds * 1e6,
              bytes / seconds * 1e-9, 100.0 * bytes / seconds / kLimit);
}

int calls_of(int m) {
  return m <= 256 ? 40 : 20;
}

void bench_embedding(const Pools& pools, int m, int width) {
  const double seconds = time_in_graph(calls_of(m), [&](int i, const Stream& stream) {
    embedding(pools.tokens.data(), m, pools.in.data(), width, 1.0f,
              pools.out.data() + part(i, static_cast<std::size_t>(m) * width), stream);
  });
  report("embedding", m, width, 4.0 * m * width, seconds);
}

void bench_rms_norm(const Pools& pools, int m, int width, bool norm, int output, int vectors) {
  const RmsNormPlan plan = vectors > 0 ? rms_norm_plan_of(width, vectors) : plan_rms_norm(width);
  if (plan.threads == 0) return;
  const std::size_t count = static_cast<std::size_t>(m) * width;
  const double seconds = time_in_graph(calls_of(m), [&](int i, const Stream& stream) {
    RmsNormArgs args;
    args.x = pools.in.data() + part(i, count);
    if (norm) args.weight = pools.weight.data();
    args.eps = 1e-5f;
    args.m = m;
    args.width = width;
    if (output == 0) args.y = pools.out.data() + part(i, count);
    if (output > 0) {
      args.y_fp8 = reinterpret_cast<std::uint8_t*>(pools.out.data() + part(i, count));
      args.y_scales = pools.scales.data();
      args.per_block = output == 2;
    }
    rms_norm(args, plan, stream);
  });
  char name[64];
  std::snprintf(name, sizeof name, "%s %s v%d%s", norm ? "norm" : "quant",
                output == 0   ? "bf16"
                : output == 1 ? "fp8/row"
                              : "fp8/128",
                plan.vectors, vectors == 0 ? " *" : "");
  report(name, m, width, (output == 0 ? 4.0 : 3.0) * static_cast<double>(count), seconds);
}

void bench_rope_kv(const Pools& pools, int m, KvType type) {
  const int width = (kHeads + 2 * kKvHeads) * kHeadDim;
  const std::size_t count = static_cast<std::size_t>(m) * width;
  const std::size_t element = element_bytes(type);
  std::vector<std::int32_t> positions(m), sequences(m), table(8192);
  for (int t = 0; t < m; ++t) positions[t] = m <= 256 ? 1000 + 7 * t : t;
  for (int t = 0; t < m; ++t) sequences[t] = 0;
  const std::size_t stride = 2 * kKvHeads * kTokensPerBlock * kHeadDim * element;
  const int blocks = 512;
  for (int i = 0; i < 8192; ++i) table[i] = i * 37 % blocks;
  const DeviceArray<std::int32_t> device_positions(positions), device_sequences(sequences), device_table(table);
  const DeviceArray<std::uint8_t> cache(stride * blocks);
  const double seconds = time_in_graph(calls_of(m), [&](int i, const Stream& stream) {
    RopeKvArgs args;
    args.qkv = pools.in.data() + part(i, count);
    args.q = pools.out.data() + part(i, count);
    args.m = m;
    args.num_heads = kHeads;
    args.num_kv_heads = kKvHeads;
    args.head_dim = kHeadDim;
    args.inv_freq = pools.weight.data();
    args.rotary_half = kHeadDim / 2;
    args.positions = device_positions.data();
    args.sequences = device_sequences.data();
    args.kv = {type, cache.data(), stride, blocks, kKvHeads, kHeadDim, kTokensPerBlock, device_table.data(), 8192};
    rope_kv(args, stream);
  });
  const double bytes = 2.0 * count + (2.0 * kHeads + 2.0 * kKvHeads * static_cast<double>(element)) * kHeadDim * m;
  report(type == KvType::kBf16 ? "rope_kv bf16" : "rope_kv fp8", m, width, bytes, seconds);
}

void bench_all() {
  const Pools pools;
  for (const int m : {1, 8, 64, 256, 2048}) {
    bench_embedding(pools, m, 4096);
    for (const int vectors : {1, 2, 4}) {
      bench_rms_norm(pools, m, 4096, true, 0, vectors);
      bench_rms_norm(pools, m, 4096, true, 1, vectors);
      bench_rms_norm(pools, m, 4096, true, 2, vectors);
    }
    for (const int vectors : {1, 2, 4}) bench_rms_norm(pools, m, 4096, false, 1, vectors);
    for (const int vectors : {4, 8}) {
      bench_rms_norm(pools, m, 14336, false, 1, vectors);
      bench_rms_norm(pools, m, 14336, false, 2, vectors);
    }
    bench_rms_norm(pools, m, 14336, true, 0, 0);
    for (const int vectors : {2, 4}) {
      bench_rms_norm(pools, m, 8192, true, 0, vectors);
      bench_rms_norm(pools, m, 8192, true, 1, vectors);
    }
    bench_rms_norm(pools, m, 28672, false, 1, 0);
    bench_rope_kv(pools, m, KvType::kBf16);
    bench_rope_kv(pools, m, KvType::kFp8);
  }
}

}  // namespace
}  // namespace aotllm::cuda

int main() {
  aotllm::cuda::bench_all();
  return 0;
}
